"""The numeric mode: in which dtypes a model computes on this machine. It belongs to the fingerprint."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class NumericMode:
    """`stored`: the dtype that weights are rounded to; `compute`: of products and activations; `kv`: of the cache.

    A CPU without bfloat16 products computes a bfloat16 model in float32: the weights keep their bfloat16 values and
    are widened as they are used, which loses nothing.
    """

    name: str
    stored: DType
    compute: DType
    kv: DType

    def rounded(self, value: float) -> float:
        """`value` in the stored dtype: what a checkpoint would hold."""
        single: float = struct.unpack("<f", struct.pack("<f", value))[0]
        if self.stored == "float16":
            half: float = struct.unpack("<e", struct.pack("<e", value))[0]
            return half
        if self.stored == "float32":
            return single
        bits = struct.unpack("<I", struct.pack("<f", single))[0]
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        wide: float = struct.unpack("<f", struct.pack("<I", bits))[0]
        return wide

    def with_kv(self, asked: str) -> NumericMode:
        """With a cache of another dtype; `auto` keeps the mode's own."""
        if asked == "auto" or asked == self.kv:
            return self
        kv: DType = "float32" if asked == "float32" else "bfloat16"
        return replace(self, kv=kv)


FLOAT32 = NumericMode("float32", "float32", "float32", "float32")
FLOAT16 = NumericMode("float16", "float16", "float16", "float16")
BFLOAT16 = NumericMode("bfloat16", "bfloat16", "bfloat16", "bfloat16")
WIDENED = NumericMode("bfloat16-widened", "bfloat16", "float32", "bfloat16")


def numeric_mode(dtype: str, device: str, *, multiplies_bfloat16: bool) -> NumericMode:
    """The mode for a run dtype (`bfloat16`, `float16` or `float32`) on a device; float16 on a CPU is bfloat16.

    `multiplies_bfloat16`: the backend has bfloat16 products here.
    """
    if dtype == "float32":
        return FLOAT32
    if dtype == "float16" and device != "cpu":
        return FLOAT16
    return BFLOAT16 if multiplies_bfloat16 else WIDENED
