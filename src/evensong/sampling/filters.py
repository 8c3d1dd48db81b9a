"""Filters on the scaled distribution, in their order: temperature, min_p, top_k, top_p.

Each row is filtered alone, in float64, so that no other row and no row count can change it. Ties go to the lowest id.
top_p: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019); min_p: Nguyen et al. (2024).
"""

from __future__ import annotations

import math

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Candidates, Float32

# Most tokens that a nucleus usually holds: sorted first, the whole vocabulary only when they do not suffice.
_FIRST_LOOK = 1024


def scale(params: SamplingParams, logits: Float32) -> Candidates:
    """The tokens of finite logit, their scores relative to the best and divided by the temperature."""
    ids = np.flatnonzero(np.isfinite(logits))
    values = logits[ids].astype(np.float64)
    if len(ids):
        # Relative to the best first: a tiny temperature then cannot overflow the best token's own score.
        with np.errstate(over="ignore"):
            values = (values - values.max()) / params.temperature
        finite = values > -np.inf
        ids, values = ids[finite], values[finite]
    return Candidates(ids, values)


def min_p(params: SamplingParams, candidates: Candidates) -> None:
    """Keeps tokens at least `min_p` times as likely as the best."""
    if params.min_p > 0.0:
        candidates.keep(candidates.scores >= math.log(params.min_p))


def top_k(params: SamplingParams, candidates: Candidates) -> None:
    """Keeps the k best."""
    k = params.top_k
    if 0 < k < len(candidates.ids):
        threshold = np.partition(candidates.scores, -k)[-k]
        mask = candidates.scores > threshold
        ties = np.flatnonzero(candidates.scores == threshold)
        mask[ties[: k - int(mask.sum())]] = True
        candidates.keep(mask)


def top_p(params: SamplingParams, candidates: Candidates) -> None:
    """Keeps the smallest set of best tokens whose probability reaches p."""
    if params.top_p >= 1.0 or not len(candidates.ids):
        return
    weights = np.exp(candidates.scores)
    wanted = params.top_p * float(weights.sum())
    order = _best_first(candidates, _FIRST_LOOK)
    reached = np.cumsum(weights[order])
    if reached[-1] < wanted and len(order) < len(weights):
        order = _best_first(candidates, len(weights))
        reached = np.cumsum(weights[order])
    # A token stays while what came before it has not reached p; the best one always does.
    count = 1 + int(np.searchsorted(reached[:-1], wanted, side="left"))
    mask = np.zeros(len(weights), dtype=bool)
    mask[order[:count]] = True
    candidates.keep(mask)


def _best_first(candidates: Candidates, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Indices of the `count` best candidates (and of those that tie with the last), best first, lowest id on a tie."""
    scores = candidates.scores
    indices = np.arange(len(scores))
    if count < len(scores):
        indices = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    # Stable: equal scores stay in ascending id.
    order: np.ndarray[tuple[int], np.dtype[np.int64]] = indices[np.argsort(-scores[indices], kind="stable")]
    return order


ORDER = (min_p, top_k, top_p)
