"""Rotary position embedding: tables made once, up to the fitted length (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from evensong.sources.model_description import Rope

Float32 = np.ndarray[Any, np.dtype[np.float32]]
# Positions whose angles are made at once, in float64.
_POSITIONS = 4096


def rotary_tables(rotary_dim: int, ropes: Iterable[Rope], max_positions: int) -> dict[Rope, tuple[Float32, Float32]]:
    """The table of each of a model's embeddings, made once for all layers that share it."""
    return {rope: rotary_table(rotary_dim, rope, max_positions) for rope in dict.fromkeys(ropes)}


def rotary_table(rotary_dim: int, rope: Rope, max_positions: int) -> tuple[Float32, Float32]:
    """cos and sin for every position, float32 [max_positions, rotary_dim / 2].

    Angles are float32 products, as those that models were trained with; their cosines are rounded from float64, so
    that no library's float32 routine matters.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = (1.0 / np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    factors = rope.factors_for(max_positions)
    if factors:
        frequencies /= np.array(factors, dtype=np.float32)
    cos = np.empty((max_positions, rotary_dim // 2), dtype=np.float32)
    sin = np.empty_like(cos)
    for start in range(0, max_positions, _POSITIONS):
        positions = np.arange(start, min(start + _POSITIONS, max_positions), dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        cos[start : start + len(positions)] = np.cos(angles) * rope.magnitude
        sin[start : start + len(positions)] = np.sin(angles) * rope.magnitude
    return cos, sin
