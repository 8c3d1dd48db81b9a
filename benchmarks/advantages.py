"""Measurements in pairs: who is asked when, and by how much we are better, pair by pair. No engine is needed here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

OWN = "evensong"
# Ratios in which more is better are ours by the peer's, the others the peer's by ours: an advantage is above 1.
HIGHER = ("tokens_per_s",)


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


def row_of(values: dict[str, dict[str, list[float]]], summed_up: Callable[[Sequence[float]], Any]) -> dict[str, Any]:
    """Each figure by side, and our advantage in it over each other side, with what `summed_up` makes of the pairs."""
    own, advantage = values[OWN], {}
    for name, peer in values.items():
        if name != OWN:
            advantage[name] = {
                figure: summed_up([_advantage(figure, *pair) for pair in zip(own[figure], peer[figure], strict=True)])
                for figure in own
            }
    figures = {figure: {side: summed_up(theirs[figure]) for side, theirs in values.items()} for figure in own}
    return {"figures": figures, "advantage": advantage}


def _advantage(figure: str, own: float, peer: float) -> float:
    better, worse = (own, peer) if figure in HIGHER else (peer, own)
    return better / worse if worse else 0.0
