"""The noise: Philox against its published answers, words by token, the distribution, and exactness of the choice."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from evensong.sampling.gumbel import LEAST_NOISE, MOST_NOISE, noise_of, philox, random_words, sample
from evensong.sampling.row import Candidates

ONES = 0xFFFFFFFF
# The known-answer vectors of the Random123 distribution for philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def candidates(scores: list[float], ids: list[int] | None = None) -> Candidates:
    return Candidates(np.array(ids if ids is not None else range(len(scores))), np.array(scores, dtype=np.float64))


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_its_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    arrays = [np.full(5, word, dtype=np.uint64) for word in counter]
    result = philox((arrays[0], arrays[1], arrays[2], arrays[3]), key)
    assert [np.unique(np.asarray(word)).tolist() for word in result] == [[word] for word in words]


def test_scalar_counter_words_equal_arrays_of_them() -> None:
    groups = np.arange(1000, dtype=np.uint64)
    scalars = philox((groups, np.uint64(77), np.uint64(3), np.uint64(0)), (5, 6))
    arrays = philox((groups, np.full_like(groups, 77), np.full_like(groups, 3), np.zeros_like(groups)), (5, 6))
    for a, b in zip(scalars, arrays, strict=True):
        assert np.array_equal(a, b)


def word_by_definition(seed: int, position: int, token_id: int) -> int:
    """Philox 4x32-10 in Python integers, as the paper defines it."""
    key = [seed & ONES, (seed >> 32) & ONES]
    counter = [token_id // 4, position, 0, 0]
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(counter[2] * 0xCD9E8D57, 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
    return counter[token_id % 4]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
@pytest.mark.parametrize("ids", [[0], [3], [49151], [1, 2, 3, 4, 5], [0, 5, 6, 7, 100, 101, 49150], list(range(3, 41))])
def test_words_are_those_of_the_definition(seed: int, ids: list[int]) -> None:
    words = random_words(seed, 1234, np.array(ids))
    assert words.tolist() == [word_by_definition(seed, 1234, token_id) for token_id in ids]


def test_a_words_value_does_not_depend_on_which_tokens_are_asked_for() -> None:
    whole = random_words(9, 50, np.arange(5000))
    rng = np.random.default_rng(0)
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        ids = np.flatnonzero(rng.random(5000) < share)
        if len(ids):
            assert np.array_equal(random_words(9, 50, ids), whole[ids])


def test_positions_and_seeds_change_the_words() -> None:
    ids = np.arange(64)
    seen = {tuple(random_words(seed, position, ids).tolist()) for seed in range(8) for position in range(8)}
    assert len(seen) == 64


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 2, 2**32 - 1, 12345])
def test_noise_keeps_its_digits_at_both_ends(word: int) -> None:
    u = (Fraction(word) + Fraction(1, 2)) / 2**32
    # -log u by its series around 1, or by a logarithm of u itself where that is exact enough.
    distance = float(1 - u)
    series = sum(distance**k / k for k in range(1, 8)) if distance < 1e-3 else -math.log(float(u))
    assert noise_of(word) == pytest.approx(-math.log(series), rel=1e-13)
    assert LEAST_NOISE <= noise_of(word) <= MOST_NOISE


def test_noise_rises_with_the_word() -> None:
    words = [0, 1, 1000, 2**20, 2**31, 2**32 - 1000, 2**32 - 3, 2**32 - 2, 2**32 - 1]
    noise = [noise_of(word) for word in words]
    assert noise == sorted(noise) and len(set(noise)) == len(noise)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
def test_the_choice_is_the_argmax_over_all_candidates(scale: float, size: int) -> None:
    """Tokens without noise could not have won: the plain argmax over everything agrees."""
    rng = np.random.default_rng(size)
    for position in range(12):
        scores = -np.abs(rng.standard_normal(size)) * scale
        scores -= scores.max()
        ids = np.sort(rng.choice(50_000, size, replace=False))
        totals = [
            score + noise_of(word_by_definition(5, position, int(token_id)))
            for score, token_id in zip(scores.tolist(), ids, strict=True)
        ]
        assert sample(Candidates(ids, scores), 5, position) == ids[totals.index(max(totals))]


def test_a_token_out_of_reach_never_wins_and_costs_nothing() -> None:
    assert {sample(candidates([0.0, -30.0, -1e9]), seed, 7) for seed in range(200)} == {0}


def test_equal_totals_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant_words(*_: object) -> np.ndarray:  # type: ignore[type-arg]
        return np.full(4, 2**31, dtype=np.uint64)

    monkeypatch.setattr("evensong.sampling.gumbel.random_words", constant_words)
    assert sample(candidates([0.0, 0.0, 0.0, 0.0], [5, 8, 9, 40]), 1, 1) == 5
    assert sample(candidates([-1e-12, -1e-13, -1e-13, 0.0], [5, 8, 9, 40]), 1, 1) == 40


def test_samples_follow_the_softmax() -> None:
    """A chi-square test over positions, and one over seeds, at 0.1 % significance."""
    scores = np.array([0.0, -0.3, -1.0, -1.5, -2.0, -3.0, -4.0])
    expected = np.exp(scores) / np.exp(scores).sum()
    draws = 4_000
    critical = 22.46  # chi-square with 6 degrees of freedom, upper 0.1 %
    for draw in (
        lambda i: sample(candidates(scores.tolist()), 42, i),
        lambda i: sample(candidates(scores.tolist()), i, 42),
    ):
        counts = np.bincount([draw(i) for i in range(draws)], minlength=7)
        assert ((counts - draws * expected) ** 2 / (draws * expected)).sum() < critical


def test_the_words_of_a_vocabulary_are_uniform() -> None:
    words = random_words(3, 10, np.arange(1 << 16))
    counts = np.bincount((words >> np.uint64(24)).astype(np.int64), minlength=256)
    # 255 degrees of freedom, upper 0.1 %.
    assert ((counts - 256) ** 2 / 256).sum() < 330.5
