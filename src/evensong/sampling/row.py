"""What the sampler knows of one request, and the array types of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from evensong.protocol.sampling_params import SamplingParams

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Float64 = np.ndarray[Any, np.dtype[np.float64]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
# A bit for each token id, the lowest first: set where the token may be drawn.
Bitmask = np.ndarray[Any, np.dtype[np.uint32]]


class RowProcessor(Protocol):
    """An operator's own step (sampling/processors.py)."""

    def apply(self, row: SamplingRow, logits: Float32) -> str | None:
        """Changes `logits` [vocab_size] in place; returns what went wrong."""


@dataclass(slots=True)
class SamplingRow:
    """One request at the position that is to be sampled: its settings and its tokens so far.

    `changes_logits`: whether a step of the sampler changes its logits before a token is drawn; None: not worked out.
    `bitmask` [num_words]: what alone may be drawn. `processors` are the logits processors that act on it, in order.
    `feed_slot`: where the token goes, for a later step that names it before it is known here; -1: nowhere.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int] | Int64
    output_token_ids: Sequence[int] | Int64
    eos_token_ids: Sequence[int]
    changes_logits: bool | None = None
    bitmask: Bitmask | None = None
    feed_slot: int = -1
    processors: tuple[RowProcessor, ...] = ()

    @property
    def position(self) -> int:
        """Index, in prompt plus output, of the token that is to be sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass
class Candidates:
    """Tokens that may still be sampled: ids in ascending order, and their scores (0 for the best, lower for others)."""

    ids: Int64
    scores: Float64

    def keep(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Drops the candidates where `mask` is False."""
        if not mask.all():
            self.ids, self.scores = self.ids[mask], self.scores[mask]

    def select(self, indices: Int64) -> None:
        """Keeps the candidates at `indices`, which ascend."""
        self.ids, self.scores = self.ids[indices], self.scores[indices]
