"""Position-keyed noise: the same request draws the same numbers wherever and however it runs.

Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Key: the int64 seed as 64 bits.
Counter: (token id / 4, position in prompt plus output, purpose, 0); the word is token id mod 4. A word w becomes
u = (w + 1/2) / 2^32 and noise -log(-log u); argmax(score + noise) is a sample of the softmax (the Gumbel-max trick).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from evensong.sampling.elementwise import exp
from evensong.sampling.row import Candidates, Int64

UInt64 = np.ndarray[Any, np.dtype[np.uint64]]
Word = UInt64 | np.uint64
Counter = tuple[Word, Word, Word, Word]

PURPOSE_SAMPLE = 0
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_UNITY = 2**32 - 0.5  # a word's distance from u = 1, in units of 2^-32, is this less the word
# The largest u is 1 - 2^-33 and the smallest 2^-33: all noise lies in [-3.15, 22.88].
LEAST_NOISE, MOST_NOISE = -3.15, 22.88
# float32's exp and quotient are good to 1e-6; tokens this close to winning are compared exactly.
_SLACK = np.float32(1.001)


def philox(counter: Counter, key: tuple[int, int]) -> list[Word]:
    """Philox 4x32-10: four arrays of 32-bit words (in uint64) for arrays of counter words and one key.

    A counter word that is the same for all may be a scalar.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        high0, high1 = product0 >> _SHIFT, product1 >> _SHIFT
        # In place where these are arrays: memory that is in the cache already is the faster half of the work.
        high0 ^= c3
        high0 ^= np.uint64(k1)
        high1 ^= c1
        high1 ^= np.uint64(k0)
        product0 &= _LOW
        product1 &= _LOW
        c0, c1, c2, c3 = high1, product1, high0, product0
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def random_words(seed: int, position: int, token_ids: Int64, purpose: int = PURPOSE_SAMPLE) -> UInt64:
    """The 32-bit word of each token id at a position. `token_ids` ascend; there is at least one."""
    bits = seed & 0xFFFFFFFFFFFFFFFF
    first_group, last_group = int(token_ids[0]) >> 2, int(token_ids[-1]) >> 2
    if 2 * len(token_ids) > 4 * (last_group - first_group + 1):
        # Most of a stretch of the vocabulary: every group of four in it, without looking for those that occur.
        groups = np.arange(first_group, last_group + 1, dtype=np.uint64)
        places = token_ids - 4 * first_group
    else:
        of_token = (token_ids >> 2).astype(np.uint64)
        first = np.ones(len(of_token), dtype=bool)
        first[1:] = of_token[1:] != of_token[:-1]
        groups = of_token[first]
        places = 4 * (np.cumsum(first) - 1) + (token_ids & 3)
    counter = (groups, np.uint64(position), np.uint64(purpose), np.uint64(0))
    words: UInt64 = np.stack(philox(counter, (bits & 0xFFFFFFFF, bits >> 32)), axis=-1).reshape(-1)
    return words if len(words) == len(places) else words[places]


def noise_of(word: int) -> float:
    """-log(-log u) of a word. -log u is taken as log1p of the distance from 1, which keeps its digits near 1.

    By the C library's scalar logarithm: a vectorised one may round the last elements of an array in another way.
    """
    return -math.log(-math.log1p(-(_UNITY - word) / 2**32))


def sample(candidates: Candidates, seed: int, position: int) -> int:
    """The candidate of the highest score plus noise, lowest id on a tie. At least one candidate is needed.

    Noise is computed for the few that can win. With d = 1 - u, noise is at most -log d, so a token reaches a total B
    only if exp(score) / d >= exp(B); the token with the highest such quotient gives a B that hardly any other reaches.
    """
    best = int(candidates.scores.argmax())
    if len(candidates.ids) > 1:
        # Even with the largest noise, a token this far below the best cannot overtake the best with the smallest.
        candidates.keep(candidates.scores >= candidates.scores[best] + (LEAST_NOISE - MOST_NOISE))
    if len(candidates.ids) == 1:
        return int(candidates.ids[0])
    words = random_words(seed, position, candidates.ids)
    distances = words.astype(np.float64)
    np.subtract(_UNITY, distances, out=distances)
    distances *= 2.0**-32
    quotients = exp(candidates.scores.astype(np.float32)) / distances.astype(np.float32)
    leader = int(quotients.argmax())
    reached = float(candidates.scores[leader]) + noise_of(int(words[leader]))
    finalists = np.flatnonzero(quotients * _SLACK >= np.float32(math.exp(reached)))
    totals = [float(candidates.scores[i]) + noise_of(int(words[i])) for i in finalists]
    return int(candidates.ids[finalists[totals.index(max(totals))]])
