"""Rotary scaling of every kind as factors by which frequencies are divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.model_description import Rope
from evensong.sources.values import number, numbers, whole

_MAX_DIM = 1 << 16
_KINDS = "linear, llama3, yarn, longrope"


def scaled_rope(theta: float, rotary_dim: int, scaling: Mapping[str, Any], max_positions: int) -> Rope:
    """The Rope of one entry of config.json's rope_parameters (before: rope_scaling).

    `max_positions`: the model's max_position_embeddings as stored. Raises ConfigError for kinds that do not exist here,
    KeyError and ValueError for entries that are not whole.
    """
    kind = _kind(scaling)
    if kind == "default":
        return Rope(theta)
    if rotary_dim > _MAX_DIM:
        raise ValueError(f"{rotary_dim} rotated components of a head")
    if kind == "linear":
        return Rope(theta, (_factor(scaling),) * (rotary_dim // 2))
    if kind == "llama3":
        return Rope(theta, _llama3(theta, rotary_dim, scaling))
    if kind == "yarn":
        return _yarn(theta, rotary_dim, scaling)
    if kind == "longrope":
        return _longrope(theta, scaling, max_positions)
    raise ConfigError(f"rope scaling of type {kind!r:.80} is not supported; supported: {_KINDS}")


def scaled_length(scaling: Mapping[str, Any], max_positions: int) -> int:
    """The longest sequence of a model whose max_position_embeddings does not count this scaling in."""
    kind = _kind(scaling)
    if kind == "linear":
        return int(max_positions * _factor(scaling))
    if kind == "yarn":
        return int(whole(scaling, "original_max_position_embeddings") * _factor(scaling))
    return max_positions


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    return "longrope" if kind == "su" else kind  # the name in Phi-3's first files


def _factor(scaling: Mapping[str, Any]) -> float:
    factor = number(scaling, "factor")
    if not 1 <= factor < 2**31:
        raise ValueError(f"a rope scaling factor of {factor}")
    return factor


def _original(scaling: Mapping[str, Any]) -> int:
    original = whole(scaling, "original_max_position_embeddings")
    if not 1 < original < 2**31:
        raise ValueError(f"original_max_position_embeddings is {original}")
    return original


def _llama3(theta: float, rotary_dim: int, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Llama 3.1: long waves are stretched by `factor`, short ones not at all, those between by a mean of both."""
    factor, original = _factor(scaling), _original(scaling)
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
    if not 0 < low < high:
        raise ValueError(f"low_freq_factor {low} and high_freq_factor {high}")
    factors = []
    for i in range(rotary_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / rotary_dim)
        share = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)


def _yarn(theta: float, rotary_dim: int, scaling: Mapping[str, Any]) -> Rope:
    """Peng et al., YaRN, 2023: as llama3, between waves that turn `beta_fast` and `beta_slow` times over the original
    length; rotated components grow with the logarithm of the factor."""
    factor, original = _factor(scaling), _original(scaling)

    def place(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(number(scaling, "beta_fast", 32)), place(number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001
    stretched = (min(1.0, max(0.0, (i - low) / width)) for i in range(rotary_dim // 2))
    factors = tuple(1 / (share / factor + 1 - share) for share in stretched)
    return Rope(theta, factors, magnitude=number(scaling, "attention_factor", _yarn_magnitude(factor, scaling)))


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1

    scale, over = number(scaling, "mscale", 0.0), number(scaling, "mscale_all_dim", 0.0)
    return of(scale) / of(over) if scale and over else of(1.0)


def _longrope(theta: float, scaling: Mapping[str, Any], max_positions: int) -> Rope:
    """Ding et al., LongRoPE, 2024: searched factors, one set up to the original length and one beyond."""
    original = _original(scaling)
    factor = number(scaling, "factor", max_positions / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        theta,
        numbers(scaling, "short_factor"),
        long_factors=numbers(scaling, "long_factor"),
        original_max_position=original,
        magnitude=number(scaling, "attention_factor", magnitude),
    )
