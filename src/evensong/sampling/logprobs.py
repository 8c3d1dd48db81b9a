"""Raw log-probabilities: of the model's own distribution, before any bias, penalty, mask or temperature."""

from __future__ import annotations

import numpy as np

from evensong.protocol.output import TokenLogprobs
from evensong.sampling.row import Float32


def token_logprobs(logits: Float32, token_id: int, count: int) -> TokenLogprobs:
    """Log-probability of the sampled token and of the `count` best ones of one row of raw logits [vocab_size].

    The sum over the vocabulary has one fixed order: a row of its own, in float64, never split over threads or rows.
    """
    best = logits.max()
    total = float(np.sum(np.exp(logits - best), dtype=np.float64))
    shift = float(best) + float(np.log(total))
    top = _top(logits, count)
    ids = [token_id, *(int(i) for i in top)]
    values = [float(np.float32(float(logits[i]) - shift)) for i in ids]
    rank = 1 + int(np.count_nonzero(logits > logits[token_id]))
    return TokenLogprobs(ids, values, rank)


def _top(logits: Float32, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Ids of the `count` largest logits, best first, lowest id on a tie."""
    count = min(count, len(logits))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= threshold)
    ordered: np.ndarray[tuple[int], np.dtype[np.int64]] = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return ordered
