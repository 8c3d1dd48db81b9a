"""Stored tensors to float32 arrays. The arithmetic of the quantised types is the `gguf` package's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from evensong.sources.weights import TensorEntry

Float32 = np.ndarray[Any, np.dtype[np.float32]]


def dequantize(entry: TensorEntry) -> Float32:
    """The tensor's values as float32, in its shape; rows of rotary heads in Hugging Face order."""
    values = _plain(entry) if entry.dtype in ("F32", "F16", "BF16") else _quantised(entry)
    values = values.reshape(entry.shape)
    return _split_rotary_halves(values, entry.rotary_heads) if entry.rotary_heads else values


def _plain(entry: TensorEntry) -> Float32:
    if entry.dtype == "F32":
        return entry.data.view(np.float32)
    if entry.dtype == "F16":
        return entry.data.view(np.float16).astype(np.float32)
    # bfloat16 is the upper half of a float32.
    return (entry.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _quantised(entry: TensorEntry) -> Float32:
    rows = math.prod(entry.shape[:-1])
    result: Float32 = gguf_dequantize(entry.data.reshape(rows, -1), GGMLQuantizationType[entry.dtype])
    return result


def _split_rotary_halves(values: Float32, heads: int) -> Float32:
    """Undoes the interleaving of each head's rotary pairs: rows (0,1),(2,3).. become 0,2,.. then 1,3,.."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
