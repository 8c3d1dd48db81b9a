"""Stored tensors to float32 arrays.

The block layouts of the quantised types are ggml's. Q4_1 and Q8_0 have routines of their own here, with the same
arithmetic in the same order as the `gguf` package's, in pieces that stay in a core's cache; that package does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from evensong.protocol.errors import ConfigError
from evensong.sources.weights import TensorEntry

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# First and end of what is wanted of a dimension.
Ranges = Sequence[tuple[int, int]]

_BLOCK = 32
_BLOCKS_AT_ONCE = 2048
# Rows whose columns are cut at once.
_ROWS_AT_ONCE = 256


def dequantize(entry: TensorEntry, rows: Ranges | None = None, columns: Ranges | None = None) -> Float32:
    """The values as float32, in the tensor's shape and in memory of their own; rotary heads in Hugging Face order.

    Of `rows` and `columns` alone, where they are given: other rows are not read, and of no more than some hundred rows
    the other columns are in memory. Raises ConfigError where the rows cannot be those of rotary heads.
    """
    if rows is None and columns is None:
        return _whole(entry)
    rows = [(0, entry.shape[0])] if rows is None else rows
    if columns is None:
        parts = [_rows(entry, first, end) for first, end in rows]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    width = sum(end - first for first, end in columns)
    out = np.empty((sum(end - first for first, end in rows), width), np.float32)
    at = 0
    for first, end in rows:
        for start in range(first, end, _ROWS_AT_ONCE):
            part = _rows(entry, start, min(start + _ROWS_AT_ONCE, end))
            np.concatenate([part[:, a:b] for a, b in columns], axis=1, out=out[at : at + len(part)])
            at += len(part)
    return out


def _rows(entry: TensorEntry, first: int, end: int) -> Float32:
    """Rows of a tensor."""
    if len(entry.shape) < 2:  # blocks lie along the only dimension
        return _whole(entry)[first:end]
    # The rows of a rotary head change places among themselves.
    unit = entry.shape[0] // entry.rotary_heads if entry.rotary_heads else 1
    begin, stop = first // unit * unit, -(-end // unit) * unit
    data = entry.data.reshape(entry.shape[0], -1)[begin:stop].reshape(-1)
    heads = (stop - begin) // unit if entry.rotary_heads else 0
    part = replace(entry, shape=(stop - begin, *entry.shape[1:]), data=data, rotary_heads=heads)
    return _whole(part)[first - begin : end - begin]


def _whole(entry: TensorEntry) -> Float32:
    with np.errstate(all="ignore"):  # scales that are no numbers give values that are none, without a warning
        if entry.dtype in ("F32", "F16", "BF16"):
            values = _plain(entry)
        elif entry.dtype == "Q8_0":
            values = _q8_0(entry.data)
        elif entry.dtype == "Q4_1":
            values = _q4_1(entry.data)
        else:
            rows = math.prod(entry.shape[:-1])
            values = gguf_dequantize(entry.data.reshape(rows, -1), GGMLQuantizationType[entry.dtype])
    values = values.reshape(entry.shape)
    return _split_rotary_halves(values, entry) if entry.rotary_heads else values


def _plain(entry: TensorEntry) -> Float32:
    if entry.dtype == "F32":
        return entry.data.view(np.float32).copy()
    if entry.dtype == "F16":
        return entry.data.view(np.float16).astype(np.float32)
    # bfloat16 is the upper half of a float32.
    return (entry.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(data: Bytes) -> Float32:
    """Blocks of a float16 scale and 32 signed bytes."""
    blocks = data.reshape(-1, 34)
    out = np.empty((len(blocks), _BLOCK), np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = blocks[start : start + _BLOCKS_AT_ONCE]
        scale = np.ascontiguousarray(part[:, :2]).view(np.float16).astype(np.float32)
        np.multiply(part[:, 2:].view(np.int8), scale, out=out[start : start + len(part)])
    return out


def _q4_1(data: Bytes) -> Float32:
    """Blocks of a float16 scale, a float16 minimum and 32 half bytes: the first 16 values lie in the low halves."""
    blocks = data.reshape(-1, 20)
    out = np.empty((len(blocks), _BLOCK), np.float32)
    halves = np.empty((min(len(blocks), _BLOCKS_AT_ONCE), _BLOCK // 2), np.uint8)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = blocks[start : start + _BLOCKS_AT_ONCE]
        target, half = out[start : start + len(part)], halves[: len(part)]
        scale_min = np.ascontiguousarray(part[:, :4]).view(np.float16).astype(np.float32)
        np.bitwise_and(part[:, 4:], 15, out=half)
        np.multiply(half, scale_min[:, :1], out=target[:, :16])
        np.right_shift(part[:, 4:], 4, out=half)
        np.multiply(half, scale_min[:, :1], out=target[:, 16:])
        target += scale_min[:, 1:]
    return out


def _split_rotary_halves(values: Float32, entry: TensorEntry) -> Float32:
    """Undoes the interleaving of each head's rotary pairs: rows (0,1),(2,3).. become 0,2,.. then 1,3,.."""
    half, rest = divmod(values.shape[0], 2 * entry.rotary_heads)
    if rest:
        raise ConfigError(f"{entry.name} has {values.shape[0]} rows, which are not {entry.rotary_heads} heads")
    return values.reshape(entry.rotary_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
