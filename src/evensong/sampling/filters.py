"""Filters on the scaled distribution, in their order: temperature, min_p, top_k, top_p.

Each row is filtered alone, in float64, so that no other row and no row count can change it. Ties go to the lowest id.
top_p: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019); min_p: Nguyen et al. (2024).
"""

from __future__ import annotations

import math

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.elementwise import exp
from evensong.sampling.ranking import best_indices
from evensong.sampling.row import Candidates, Float32, Float64, Int64

# Tokens this many nats below the best are dropped at once: all of a vocabulary together weighs less than 1e-20 there,
# too little for any sum in float64, and no noise lifts one of them to the top. Rounding the bound to float32 moves it
# by at most another 64 nats, at temperatures near the spacing of float32.
_DEPTH = 64.0
# Scores are put into bins of 1/64 nat, so that top_p sorts only the one bin in which p is reached.
_BINS_PER_NAT = 64.0
# Distances below the best, in nats, that are tried in turn for a set that weighs enough.
_LEVELS = (1.0, 4.0, 8.0)


def scale(params: SamplingParams, logits: Float32) -> Candidates:
    """The tokens that can matter, their scores relative to the best and divided by the temperature.

    The largest of `logits` is finite; -inf marks a forbidden token, which is no candidate at any temperature.
    """
    best = float(logits.max())
    # At a temperature so high that nothing finite is that far below, the lowest float32 still excludes -inf.
    lowest = max(best - _DEPTH * params.temperature, float(np.finfo(np.float32).min))
    near = logits >= np.float32(lowest)
    if near.all():
        ids, values = np.arange(len(logits)), logits.astype(np.float64)
    else:
        ids = np.flatnonzero(near)
        values = logits[ids].astype(np.float64)
    # Relative to the best first: a tiny temperature then cannot overflow the best token's own score.
    values -= best
    with np.errstate(over="ignore"):
        values /= params.temperature
    return Candidates(ids, values)


def min_p(params: SamplingParams, candidates: Candidates) -> None:
    """Keeps tokens at least `min_p` times as likely as the best."""
    if params.min_p > 0.0:
        candidates.keep(candidates.scores >= math.log(params.min_p))


def top_k(params: SamplingParams, candidates: Candidates) -> None:
    """Keeps the k best."""
    if 0 < params.top_k < len(candidates.ids):
        candidates.select(np.sort(best_indices(candidates.scores, params.top_k)))


def top_p(params: SamplingParams, candidates: Candidates) -> None:
    """Keeps the smallest set of best tokens whose probability reaches p."""
    if params.top_p >= 1.0 or len(candidates.ids) < 2:
        return
    weights = exp(candidates.scores)
    wanted = params.top_p * float(weights.sum())
    near = _enough(candidates.scores, weights, wanted)
    scores, weights = candidates.scores[near], weights[near]
    bins = (scores * -_BINS_PER_NAT).astype(np.int64)
    reached = np.cumsum(np.bincount(bins, weights=weights))
    # Rounding may leave the whole a little short of p; then it is the last bin that reaches it.
    last = min(int(np.searchsorted(reached, wanted, side="left")), len(reached) - 1)
    before = float(reached[last - 1]) if last else 0.0
    mask = bins < last
    # Of the bin that reaches p, a token stays while what came before it has not reached p; the first always does.
    members = np.flatnonzero(bins == last)
    members = members[best_indices(scores[members], len(members))]
    sums = before + np.cumsum(weights[members])
    mask[members[: 1 + int(np.searchsorted(sums[:-1], wanted, side="left"))]] = True
    candidates.select(near[mask])


def _enough(scores: Float64, weights: Float64, wanted: float) -> Int64:
    """Indices, in ascending order, of best tokens that weigh at least `wanted` together."""
    for distance in _LEVELS:
        near = np.flatnonzero(scores >= -distance)
        if float(weights[near].sum()) >= wanted:
            return near
    return np.arange(len(scores))


ORDER = (min_p, top_k, top_p)
