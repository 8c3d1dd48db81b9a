"""Position-keyed noise: the same request draws the same numbers wherever and however it runs.

Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Key: the int64 seed as 64 bits.
Counter: (token id / 4, position in prompt plus output, purpose, 0); the word is token id mod 4. A word w becomes
u = (w + 1/2) / 2^32 and noise -log(-log u); argmax(score + noise) is a sample of the softmax (the Gumbel-max trick).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from evensong.sampling.row import Candidates, Float64, Int64

UInt64 = np.ndarray[Any, np.dtype[np.uint64]]

PURPOSE_SAMPLE = 0
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
# The largest u is 1 - 2^-33 and the smallest 2^-33: all noise lies in [-3.14, 22.88].
NOISE_RANGE = 22.88 + 3.14
# Vectorised logarithms of different libraries differ by a few units in the last place; scores closer than this to the
# best are compared again with the C library's scalar logarithm, which has no vector tails.
_CLOSE = 1e-9


def philox(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[int, int]) -> list[UInt64]:
    """Philox 4x32-10: four arrays of 32-bit words (in uint64) for arrays of counters and one key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def random_words(seed: int, position: int, token_ids: Int64, purpose: int = PURPOSE_SAMPLE) -> UInt64:
    """The 32-bit word of each token id at a position. `token_ids` ascend."""
    bits = seed & 0xFFFFFFFFFFFFFFFF
    groups = (token_ids >> 2).astype(np.uint64)
    first = np.ones(len(groups), dtype=bool)
    first[1:] = groups[1:] != groups[:-1]
    unique = groups[first]
    zeros = np.zeros_like(unique)
    counter = (unique, zeros + np.uint64(position), zeros + np.uint64(purpose), zeros)
    words = np.stack(philox(counter, (bits & 0xFFFFFFFF, bits >> 32)))
    result: UInt64 = words[token_ids & 3, np.cumsum(first) - 1]
    return result


def noise_of(words: UInt64) -> Float64:
    """-log(-log u) for each word. Close to 1, -log u is taken as log1p of the distance, which keeps its digits."""
    distance = (np.float64(2**32) - 0.5 - words.astype(np.float64)) / 2**32  # 1 - u, exact
    noise: Float64 = -np.log(-np.log1p(-distance))
    return noise


def _exact_noise(word: int) -> float:
    return -math.log(-math.log1p(-((2**32 - 0.5 - word) / 2**32)))


def sample(candidates: Candidates, seed: int, position: int) -> int:
    """The candidate of the highest score plus noise, lowest id on a tie. At least one candidate is needed."""
    # Even with the largest noise, a token this far below the best cannot overtake the best with the smallest.
    candidates.keep(candidates.scores >= -NOISE_RANGE)
    if len(candidates.ids) == 1:
        return int(candidates.ids[0])
    words = random_words(seed, position, candidates.ids)
    totals = candidates.scores + noise_of(words)
    finalists = np.flatnonzero(totals >= totals.max() - _CLOSE)
    if len(finalists) == 1:
        return int(candidates.ids[finalists[0]])
    exact = [float(candidates.scores[i]) + _exact_noise(int(words[i])) for i in finalists]
    return int(candidates.ids[finalists[exact.index(max(exact))]])
