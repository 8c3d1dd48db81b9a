"""Two passes over a model's declarations: packing its tensors, and handing them out packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from evensong.distributed.split import Share, Span
from evensong.kernels.cpu.native import extension
from evensong.kernels.cpu.packed_file import Entry, PackedFile, TensorMeta
from evensong.kernels.cpu.packed_writer import PackedWriter
from evensong.kernels.cpu.recorder import NativeWeight
from evensong.kernels.interface import (
    Builder,
    Extent,
    Float32,
    Norm,
    ReadTensor,
    Spans,
    Weight,
    bias_spans,
    linear_spans,
    span_of,
)
from evensong.kernels.mode import DType


class PackingBuilder(Builder):
    """Writes every tensor, rounded to `stored` and packed for `isa`, into a file of packed weights."""

    def __init__(self, share: Share, read: ReadTensor, writer: PackedWriter, isa: str, stored: DType) -> None:
        super().__init__(share)
        self._read = read
        self._writer = writer
        self._isa = isa
        self._stored = stored
        self._native = extension()

    def linear(self, parts: Mapping[str, Extent], inputs: Extent, *, bias: bool = False, gated: bool = False) -> Weight:
        self._pack(_key(parts), self._joined(linear_spans(parts, inputs)), gated)
        if bias and self.adds_bias(inputs):
            values = self._rounded(self._joined(bias_spans(parts)))
            self._writer.add_plain(f"{_key(parts)} bias", self._native.pack_bias(values, self._isa, gated))
        return None

    def _joined(self, tensors: list[tuple[str, Spans]]) -> Float32:
        values = [self._read(name, spans) for name, spans in tensors]
        return values[0] if len(values) == 1 else np.concatenate(values)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        self._writer.add_plain(name, self._rounded(self._read(name, (Span.whole(size),))) + np.float32(offset))

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        rows = []
        for name, heads in parts.items():
            values = self._read(f"{name}.weight", (Span.whole(head_dim),))
            weight = self._rounded(values) + np.float32(offset)
            rows.append(np.broadcast_to(weight, (heads, head_dim)))
        self._writer.add_plain(_key(parts), np.concatenate(rows))

    def table(self, name: str, rows: Extent, width: int) -> Weight:
        self._pack(name, self._read(name, (span_of(rows), Span.whole(width))), gated=False)
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
    """Hands out what a PackingBuilder wrote, in place: nothing is read or copied. `used`: what was handed out."""

    def __init__(self, share: Share, packed: PackedFile, isa: str) -> None:
        super().__init__(share)
        self.used: set[str] = set()
        self._packed = packed
        self._isa = isa
        self._native = extension()

    def linear(self, parts: Mapping[str, Extent], inputs: Extent, *, bias: bool = False, gated: bool = False) -> Weight:
        key = _key(parts)
        first = span_of(next(iter(parts.values()))).first
        return NativeWeight(
            self._weight(key),
            self._entry(f"{key} bias").floats() if bias and self.adds_bias(inputs) else None,
            partial=not span_of(inputs).is_whole,
            first=first,
        )

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        return self._entry(name).floats()

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        return self._entry(_key(parts)).floats()

    def table(self, name: str, rows: Extent, width: int) -> Weight:
        return NativeWeight(self._weight(name), partial=not span_of(rows).is_whole, first=span_of(rows).first)

    def head(self, table: Weight) -> Weight:
        return table

    def _entry(self, key: str) -> Entry:
        self.used.add(key)
        return self._packed.entry(key)

    def _weight(self, key: str) -> Any:
        entry = self._entry(key)
        return self._native.Weight(entry.data, entry.rows, entry.cols, entry.dtype, self._isa)


def _key(parts: Mapping[str, Any]) -> str:
    """The name of several tensors that are kept as one."""
    return "+".join(_shortened(list(parts)))


def _shortened(names: list[str]) -> Iterator[str]:
    yield names[0]
    for name in names[1:]:
        yield name.rsplit(".", 1)[-1]
