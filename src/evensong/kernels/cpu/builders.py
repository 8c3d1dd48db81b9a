"""Two passes over a model's declarations: packing its tensors, and handing them out packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from evensong.kernels.cpu.native import extension
from evensong.kernels.cpu.packed_file import PackedFile, TensorMeta
from evensong.kernels.cpu.packed_writer import PackedWriter
from evensong.kernels.cpu.recorder import NativeWeight
from evensong.kernels.interface import Builder, Float32, Norm, ReadTensor, Weight
from evensong.kernels.mode import DType


class PackingBuilder(Builder):
    """Writes every tensor, rounded to `stored` and packed for `isa`, into a file of packed weights."""

    def __init__(self, read: ReadTensor, writer: PackedWriter, isa: str, stored: DType) -> None:
        self._read = read
        self._writer = writer
        self._isa = isa
        self._stored = stored
        self._native = extension()

    def linear(self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, gated: bool = False) -> Weight:
        weights = [self._read(f"{name}.weight", (size, in_features)) for name, size in parts.items()]
        self._pack(_key(parts), weights[0] if len(weights) == 1 else np.concatenate(weights), gated)
        if bias:
            values = np.concatenate([self._read(f"{name}.bias", (size,)) for name, size in parts.items()])
            self._writer.add_plain(
                f"{_key(parts)} bias", self._native.pack_bias(self._rounded(values), self._isa, gated)
            )
        return None

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        self._writer.add_plain(name, self._rounded(self._read(name, (size,))) + np.float32(offset))

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        rows = []
        for name, heads in parts.items():
            weight = self._rounded(self._read(f"{name}.weight", (head_dim,))) + np.float32(offset)
            rows.append(np.broadcast_to(weight, (heads, head_dim)))
        self._writer.add_plain(_key(parts), np.concatenate(rows))

    def table(self, name: str, rows: int, width: int) -> Weight:
        self._pack(name, self._read(name, (rows, width)), gated=False)
        return None

    def head(self, table: Weight) -> Weight:
        return None

    def _pack(self, key: str, weight: Float32, gated: bool) -> None:
        rows, cols = weight.shape
        nbytes = self._native.packed_size(rows, cols, self._isa, self._stored, gated)
        target = self._writer.add(key, nbytes, TensorMeta(rows, cols, self._stored, gated))
        self._native.pack_into(np.ascontiguousarray(weight), self._isa, self._stored, gated, target)

    def _rounded(self, values: Float32) -> Float32:
        """In the stored dtype, and wide again: to the nearest, ties to even."""
        if self._stored == "float32":
            return values
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), values, rounded.view(np.float32))


class NativeBuilder(Builder):
    """Hands out what a PackingBuilder wrote, in place: nothing is read or copied."""

    def __init__(self, packed: PackedFile, isa: str) -> None:
        self._packed = packed
        self._isa = isa
        self._native = extension()

    def linear(self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, gated: bool = False) -> Weight:
        key = _key(parts)
        return NativeWeight(self._weight(key), self._packed.entry(f"{key} bias").floats() if bias else None)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        return self._packed.entry(name).floats()

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        return self._packed.entry(_key(parts)).floats()

    def table(self, name: str, rows: int, width: int) -> Weight:
        return NativeWeight(self._weight(name))

    def head(self, table: Weight) -> Weight:
        return table

    def _weight(self, key: str) -> Any:
        entry = self._packed.entry(key)
        return self._native.Weight(entry.data, entry.rows, entry.cols, entry.dtype, self._isa)


def _key(parts: Mapping[str, int]) -> str:
    """The name of several tensors that are kept as one."""
    return "+".join(_shortened(list(parts)))


def _shortened(names: list[str]) -> Iterator[str]:
    yield names[0]
    for name in names[1:]:
        yield name.rsplit(".", 1)[-1]
