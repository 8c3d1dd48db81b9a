"""A reader for safetensors files (format: the safetensors project's README): header, then raw data.

The format's own rules are kept: the tensors' bytes lie side by side, without holes, without overlap, and fill the file.
"""

from __future__ import annotations

import collections
import json
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from evensong.protocol.errors import ConfigError
from evensong.sources.values import is_whole

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 100 * 1024 * 1024
# Weights have up to five dimensions. A tensor without values may have any lengths beside its 0, and numpy none beyond.
_MAX_DIMENSIONS = 8
_MAX_VALUES = 2**60


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], Bytes]]:
    """Name -> (dtype, shape, bytes) of every tensor; the bytes are views of the mapped file.

    Raises ConfigError for a file that is not whole or breaks the format's rules, naming the tensor where there is one.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    whole = np.frombuffer(data, dtype=np.uint8)
    try:
        header, base = _header(data)
        tensors = {}
        spans = []
        for name, info in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape, start, end = _entry(info, len(data) - base)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"tensor {name!r:.80}: {what}") from error
            tensors[name] = dtype, shape, whole[base + start : base + end]
            spans.append((start, end, name))
        _check_spans(spans, len(data) - base)
        return tensors
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {error}") from error


def _header(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header and where the data begins."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MAX_HEADER, len(data) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_without_doubles)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header, 8 + length


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        double = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"two entries named {double!r:.80}")
    return values


def _entry(info: dict[str, Any], size: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first byte and end of a tensor in the `size` bytes of data."""
    dtype, dimensions = info["dtype"], info["shape"]
    if not isinstance(dimensions, list) or len(dimensions) > _MAX_DIMENSIONS:
        raise ValueError(f"its shape is {dimensions!r:.40}, expected at most {_MAX_DIMENSIONS} lengths")
    shape = tuple(_whole(n) for n in dimensions)
    if math.prod(max(n, 1) for n in shape) > _MAX_VALUES:
        raise ValueError(f"its shape is {list(shape)}, which cannot be")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ValueError(f"dtype {dtype!r:.40} is not supported; supported: {', '.join(_SIZES)}")
    start, end = (_whole(n) for n in info["data_offsets"])
    if start > end:
        raise ValueError(f"its bytes end at {end}, before they start at {start}")
    if end > size:
        raise ValueError(f"it lies outside the file: {end} bytes of data are needed, {size} are there (truncated?)")
    needed = math.prod(shape) * _SIZES[dtype]
    if end - start != needed:
        raise ValueError(f"{dtype} values of shape {list(shape)} take {needed} bytes, not {end - start}")
    return dtype, shape, start, end


def _whole(value: Any) -> int:
    if not is_whole(value) or not 0 <= value <= _MAX_VALUES:
        raise ValueError(f"{value!r:.40} where a size belongs")
    return value


def _check_spans(spans: list[tuple[int, int, str]], size: int) -> None:
    at, before = 0, ""
    for start, end, name in sorted(spans):
        if start < at:
            raise ValueError(f"tensor {name!r:.80} overlaps with {before!r:.80}")
        if start > at:
            raise ValueError(f"{start - at} bytes before tensor {name!r:.80} belong to none")
        at, before = end, name
    if at != size:
        raise ValueError(f"{size - at} bytes after the last tensor belong to none")
