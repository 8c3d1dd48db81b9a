"""Raw log-probabilities: of the model's own distribution, before any bias, penalty, mask or temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evensong.protocol.output import TokenLogprobs
from evensong.sampling.elementwise import exp
from evensong.sampling.ranking import best_indices
from evensong.sampling.row import Float32

_LOWEST = float(np.finfo(np.float32).min)


def token_logprobs(logits: Float32, token_id: int, count: int, asked: Sequence[int] = ()) -> TokenLogprobs:
    """Log-probability of the sampled token, of the `count` best ones and of those `asked` for.

    `logits` is one raw row [vocab_size].

    The sum over the vocabulary has one fixed order: a row of its own, in float64, never split over threads or rows.
    """
    best = logits.max()
    with np.errstate(over="ignore"):
        total = float(np.sum(exp(logits - best), dtype=np.float64))
    shift = float(best) + math.log(total)
    ids = [token_id, *(int(i) for i in best_indices(logits, count) if logits[i] > -np.inf), *asked]
    values = [float(np.float32(max(float(logits[i]) - shift, _LOWEST))) for i in ids]
    rank = 1 + int(np.count_nonzero(logits > logits[token_id]))
    return TokenLogprobs(ids, values, rank, len(asked))
