"""Measurements in pairs: who is asked when, spreads, and the ratios pair by pair."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

OWN = "evensong"
# Ratios in which more is better are ours by the peer's, the others the peer's by ours: an advantage is above 1.
HIGHER = ("tokens_per_s",)


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and most."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def show(one: dict[str, float]) -> str:
    """A spread for a table."""
    return f"{one['median']:g} ({one['min']:g}-{one['max']:g})"


class Turns:
    """Who is asked next, and with which seed: no prompt comes twice, and who begins alternates."""

    def __init__(self, pairs: int) -> None:
        self._pairs = pairs
        self._seeds = itertools.count(1)

    def seed(self) -> int:
        """One that was not used before."""
        return next(self._seeds)

    def of(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Each name once a pair, with the pair's seed."""
        for pair in range(self._pairs):
            seed = self.seed()
            for name in names if pair % 2 == 0 else reversed(names):
                yield name, seed


def row_of(values: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Spreads of each figure by side, and of evensong's advantage, pair by pair."""
    figures = {
        figure: {side: spread(own[figure], 3) for side, own in values.items()} for figure in next(iter(values.values()))
    }
    own, ratios = values[OWN], {}
    for name, peer in values.items():
        if name != OWN:
            ratios[name] = {
                figure: spread([_advantage(figure, *pair) for pair in zip(own[figure], peer[figure], strict=True)])
                for figure in own
            }
    return {"figures": figures, "advantage": ratios}


def _advantage(figure: str, own: float, peer: float) -> float:
    better, worse = (own, peer) if figure in HIGHER else (peer, own)
    return better / worse if worse else 0.0
