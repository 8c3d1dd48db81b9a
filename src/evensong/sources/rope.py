"""Rotary scaling of every kind as factors by which frequencies are divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.model_description import Rope
from evensong.sources.values import number, whole

_KINDS = "linear, llama3"


def scaled_rope(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> Rope:
    """The Rope of one entry of config.json's rope_parameters (before: rope_scaling).

    Raises ConfigError for kinds that do not exist here, KeyError and ValueError for entries that are not whole.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, (_factor(scaling),) * (head_dim // 2))
    if kind == "llama3":
        return Rope(theta, _llama3(theta, head_dim, scaling))
    raise ConfigError(f"rope scaling of type {kind!r:.80} is not supported; supported: {_KINDS}")


def linear_factor(scaling: Mapping[str, Any]) -> float:
    """By how much linear scaling makes a model's sequences longer; 1 for other kinds."""
    return _factor(scaling) if scaling.get("rope_type", scaling.get("type")) == "linear" else 1.0


def _factor(scaling: Mapping[str, Any]) -> float:
    factor = number(scaling, "factor")
    if not 1 <= factor < math.inf:
        raise ValueError(f"a rope scaling factor of {factor}")
    return factor


def _llama3(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Llama 3.1: long waves are stretched by `factor`, short ones not at all, those between by a mean of both."""
    factor = _factor(scaling)
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
    original = whole(scaling, "original_max_position_embeddings")
    if not 0 < low < high:
        raise ValueError(f"low_freq_factor {low} and high_freq_factor {high}")
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        share = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)
