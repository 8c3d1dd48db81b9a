"""A reader for safetensors files (format: the safetensors project's README): header, then raw data."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from evensong.protocol.errors import ConfigError

_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 100 * 1024 * 1024


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]]:
    """Name -> (dtype, shape, bytes) of every tensor; the bytes are views of the mapped file. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    whole = np.frombuffer(data, dtype=np.uint8)
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(_MAX_HEADER, len(data) - 8):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(data[8 : 8 + length])
        base = 8 + length
        tensors = {}
        for name, info in header.items():
            if name != "__metadata__":
                tensors[name] = _entry(info, whole, base)
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {error}") from error


def _entry(
    info: dict[str, Any], whole: np.ndarray[Any, np.dtype[np.uint8]], base: int
) -> tuple[str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]:
    dtype, shape = info["dtype"], tuple(_whole(n) for n in info["shape"])
    if dtype not in _SIZES:
        raise ValueError(f"dtype {dtype!r:.40} is not supported; supported: {', '.join(_SIZES)}")
    start, end = (_whole(n) for n in info["data_offsets"])
    if not 0 <= start <= end <= len(whole) - base or end - start != math.prod(shape) * _SIZES[dtype]:
        raise ValueError("a tensor lies outside the file (truncated?)")
    return dtype, shape, whole[base + start : base + end]


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.40} where a size belongs")
    return value
