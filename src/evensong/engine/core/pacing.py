"""Pacing: how long the plan behind the running step may wait for messages.

A plan that is made as soon as there is room is made almost a whole step before it begins, and whoever comes meanwhile
misses it. So the core listens until shortly before the running step ends. It judges by how long such steps took
lately, and plans at once when in doubt: a device that waits for a plan costs everybody.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Steps of a like number of tokens that an estimate is made of: their shortest.
NUM_STEPS = 8
ENOUGH_STEPS = 4
# What is left at the end of a step, beside the time that planning takes: in seconds, and as a share of the step.
MARGIN_SECONDS = 0.002
MARGIN_SHARE = 0.1


class NoPacing:
    """Plans are made as soon as there is room."""

    def begins(self, num_tokens: int) -> None:
        """A step over so many tokens begins to run."""

    def ends(self) -> None:
        """It has ended."""

    def planned(self, seconds: float) -> None:
        """To plan a step and hand it in took so long."""

    def late(self) -> None:
        """The step ended before the next one was planned."""

    def seconds_left(self) -> float:
        """Until the next plan is due; 0 where it is."""
        return 0.0


class Pacing(NoPacing):
    """One step runs, and one may be planned behind it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By the number of tokens' bits.
        self._took: dict[int, deque[float]] = {}
        self._planning: deque[float] = deque(maxlen=NUM_STEPS)
        self._began: float | None = None
        self._kind = 0

    def begins(self, num_tokens: int) -> None:
        """As NoPacing.begins."""
        self._began, self._kind = self._clock(), num_tokens.bit_length()

    def ends(self) -> None:
        """As NoPacing.ends."""
        if self._began is not None:
            self._took.setdefault(self._kind, deque(maxlen=NUM_STEPS)).append(self._clock() - self._began)
            self._began = None

    def planned(self, seconds: float) -> None:
        """As NoPacing.planned."""
        self._planning.append(seconds)

    def late(self) -> None:
        """What was believed of such steps is forgotten, this one's time too: it is not known when it ended."""
        self._took.pop(self._kind, None)
        self._began = None

    def seconds_left(self) -> float:
        """As NoPacing.seconds_left."""
        took = self._took.get(self._kind, ())
        if self._began is None or len(took) < ENOUGH_STEPS or not self._planning:
            return 0.0
        shortest = min(took)
        margin = max(MARGIN_SECONDS, MARGIN_SHARE * shortest) + max(self._planning)
        return max(self._began + shortest - margin - self._clock(), 0.0)
