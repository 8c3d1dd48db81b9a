"""The sampler: an ordered list of small steps from logits to a token (docs/sampling.md has the order).

Every row is treated alone: its token and logprobs depend on its own logits, tokens and settings, and on nothing else
in the batch. A step that no row wants costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evensong.protocol.output import TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling import allowed, bad_words, bias, bitmask, min_tokens, penalties
from evensong.sampling.row import Float32, SamplingRow

# Adding a feature that changes logits: one file, and one line here.
LOGIT_STEPS = (bias, allowed, bad_words, min_tokens, penalties)

NO_TOKEN = "no token can be sampled: the model's logits are not finite"


@dataclass(frozen=True)
class Sampled:
    """One row's result: a token, or what ends this request alone: an error, or masks that leave no token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    exhausted: bool = False


class Draws(ABC):
    """What is done to a whole row of the vocabulary: filters and noise, and log-probabilities."""

    @abstractmethod
    def draw(self, logits: Float32, row: SamplingRow) -> int:
        """A token at a temperature above 0. The largest logit is finite, so that at least its token is a candidate."""

    @abstractmethod
    def logprobs(self, logits: Float32, token_id: int, count: int, asked: Sequence[int]) -> TokenLogprobs:
        """Log-probability of `token_id`, of the `count` best ones and of those `asked` for; `logits` are raw."""


def changes_logits(params: SamplingParams) -> bool:
    """Whether any step changes a row's logits before a token is drawn."""
    return any(step.wanted(params) for step in LOGIT_STEPS)


def sample_row(raw: Float32, row: SamplingRow, draws: Draws) -> Sampled:
    """One token of a row of raw logits [num_token_ids]; padding of the vocabulary is cut off before."""
    params = row.params
    best = _best(raw)
    logits = raw
    steps = [step for step in LOGIT_STEPS if step.wanted(params)]
    if (steps or row.processors or row.bitmask is not None) and best is not None:
        logits = raw.copy()
        # First, so that what the steps forbid stays forbidden.
        for processor in row.processors:
            if (fault := processor.apply(row, logits)) is not None:
                return Sampled(-1, error=fault)
        with np.errstate(over="ignore", invalid="ignore"):
            for step in steps:
                step.apply(row, logits)
        if row.bitmask is not None:
            bitmask.apply(row.bitmask, logits)
        best = _best(logits)
        if best is None and logits.max() == -np.inf:
            return Sampled(-1, exhausted=True)
    if best is None:
        return Sampled(-1, error=NO_TOKEN)
    token_id = best if params.greedy else draws.draw(logits, row)
    count = params.num_logprobs
    asked = params.logprob_token_ids or ()
    return Sampled(token_id, None if count is None else draws.logprobs(raw, token_id, count, asked))


def _best(logits: Float32) -> int | None:
    """The largest logit's id, the lowest on a tie; None where a NaN or +inf stands, or nothing but -inf."""
    best = int(logits.argmax())  # a NaN counts as largest
    return best if np.isfinite(logits[best]) else None
