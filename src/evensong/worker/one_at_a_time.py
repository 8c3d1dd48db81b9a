"""A worker whose `sample_tokens` waits, behind the verbs of one whose steps run while others are planned."""

from __future__ import annotations

import collections
from typing import Any

from evensong.protocol.step import GrammarBitmask, ModelOutput


class OneAtATime:
    """Everything else is the worker's own."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._outputs: collections.deque[ModelOutput] = collections.deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> None:
        """Waits for the step; its output is kept."""
        self._outputs.append(self._worker.sample_tokens(bitmask))

    def take_output(self) -> ModelOutput:
        """The oldest output."""
        return self._outputs.popleft()

    def output_ready(self) -> bool:
        """Always: whatever was started is over."""
        return True

    @property
    def num_in_flight(self) -> int:
        """Outputs that were not taken."""
        return len(self._outputs)

    def set_doorbell(self, fd: int) -> None:
        """Nobody needs to be woken."""
