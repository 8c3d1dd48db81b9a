"""The native sampler against the one in Python: the same words, the same tokens, and log-probabilities of float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling import gumbel
from evensong.sampling.host_draws import sample_rows
from evensong.sampling.row import Float32, Int64, SamplingRow

native = pytest.importorskip("evensong._native")
ISAS = native.supported_isas()
VOCAB = 49152

per_isa = pytest.mark.parametrize("isa", ISAS)


@dataclass
class Case:
    logits: Float32
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    position: int = 1

    def expected(self) -> int:
        """The Python sampler's token."""
        params = SamplingParams(
            temperature=self.temperature, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k, seed=self.seed
        )
        row = SamplingRow(params, np.zeros(self.position, dtype=np.int64), [], [])
        return sample_rows(self.logits[None], [row], len(self.logits))[0].token_id

    def token(self, isa: str) -> int:
        token: int = native.draw(
            self.logits, self.temperature, self.top_p, self.min_p, self.top_k, self.seed, self.position, isa
        )
        return token


def random_logits(rng: np.random.Generator, count: int) -> Float32:
    """Gaussian logits of some spread and offset; now and then with ties, and with tokens that are forbidden."""
    spread = rng.choice([0.01, 1.0, 3.0, 10.0, 100.0, 1e-40, 1e37], p=[0.1, 0.25, 0.3, 0.15, 0.1, 0.05, 0.05])
    logits = rng.standard_normal(count) * spread
    if 1e-3 < spread < 1e3:
        logits += rng.choice([0.0, -30.0, 30.0])
    if rng.random() < 0.3:
        logits = np.round(logits / spread * 4) / 4 * spread
    if rng.random() < 0.3:
        logits[rng.random(count) < rng.choice([0.1, 0.9, 1.0])] = -np.inf
        logits[rng.integers(count)] = spread
    return logits.astype(np.float32)


def random_case(rng: np.random.Generator, count: int) -> Case:
    return Case(
        random_logits(rng, count),
        temperature=float(rng.choice([0.0, 1e-9, 0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 10.0, 1e9])),
        top_p=float(rng.choice([1.0, 1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9])),
        min_p=float(rng.choice([0.0, 0.0, 0.001, 0.1, 0.5, 1.0])),
        top_k=int(rng.choice([-1, 0, 0, 1, 2, 5, 40, 64, 65, 200, 10**9])),
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        position=int(rng.integers(1, 5000)),
    )


@pytest.fixture(scope="module")
def cases() -> list[tuple[Case, int]]:
    """Cases with the Python sampler's tokens."""
    rng = np.random.default_rng(5)
    counts = [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, 127, 257, 1000, 5003]
    made = [random_case(rng, int(rng.choice(counts))) for _ in range(4000)]
    made += [random_case(rng, VOCAB) for _ in range(100)]
    return [(case, case.expected()) for case in made]


@per_isa
def test_tokens_are_those_of_the_python_sampler(cases: list[tuple[Case, int]], isa: str) -> None:
    exact = [(case, token) for case, token in cases if case.top_p == 1.0]
    assert [(case, token) for case, token in exact if case.token(isa) != token] == []
    # Where p is reached may lie within the rounding of a sum.
    summed = [(case, token) for case, token in cases if case.top_p < 1.0]
    different = sum(case.token(isa) != token for case, token in summed)
    assert len(summed) > 2000 and different <= len(summed) // 1000


@per_isa
@pytest.mark.parametrize("below", [4.0, 8.0, 11.0])
def test_tokens_far_below_the_best_can_win(below: float, isa: str) -> None:
    logits = np.full(VOCAB, 3.0 - below, dtype=np.float32)
    logits[30000] = 3.0
    made = [Case(logits, seed=11, position=position) for position in range(1, 41)]
    tokens = [case.token(isa) for case in made]
    assert tokens == [case.expected() for case in made]
    assert set(tokens) != {30000}


@per_isa
def test_words_are_the_published_ones(isa: str) -> None:
    # Random123's known answer for Philox 4x32-10 with counter and key 0.
    words = native.random_words(0, 0, np.arange(4), isa)
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@per_isa
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_words_are_those_of_python(seed: int, isa: str) -> None:
    rng = np.random.default_rng(seed & 0xFFFF)
    whole = np.arange(4099)
    for ids in (whole, np.array([2**31 - 1]), np.flatnonzero(rng.random(9000) < 0.03), whole[3:5]):
        for position in (0, 1, 77, 2**32 - 1):
            expected = gumbel.random_words(seed, position, ids)
            assert np.array_equal(native.random_words(seed, position, ids, isa), expected)
    assert np.array_equal(
        native.random_words(seed & (2**64 - 1), 5, whole, isa), native.random_words(seed, 5, whole, isa)
    )


def draw_many(logits: Float32, positions: int, isa: str, **settings: float) -> Int64:
    """Tokens at many positions, by one call of `sample`."""
    rows = np.tile(logits, (positions, 1))
    given = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 3} | settings
    columns = {name: [value] * positions for name, value in given.items()}
    tokens: Int64 = native.sample(rows, **columns, position=list(range(positions)), count=len(logits), isa=isa)
    return tokens


@per_isa
@pytest.mark.parametrize("top_k", [0, 5])
def test_tokens_follow_the_distribution(top_k: int, isa: str) -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, 1.5, -0.5, 0.0], dtype=np.float32)
    positions = 20000
    weights = np.exp(logits.astype(np.float64) / 1.3)
    if top_k:
        weights[[0, 2, 6, 7]] = 0.0
        weights[0] = 1.0  # of two equal ones the lowest id stays
    expected = positions * weights / weights.sum()
    seen = np.bincount(draw_many(logits, positions, isa, temperature=1.3, top_k=top_k), minlength=8)
    possible = expected > 0
    assert not seen[~possible].any()
    # Chi-square with at most 7 degrees of freedom: beyond 30 in 1 of 10,000 cases.
    assert ((seen - expected)[possible] ** 2 / expected[possible]).sum() < 30


@per_isa
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.97])
def test_top_p_leaves_the_smallest_set_that_reaches_p(top_p: float, isa: str) -> None:
    logits = np.random.default_rng(8).permutation(np.linspace(-4.0, 1.0, 37)).astype(np.float32)
    order = np.argsort(-logits)
    weights = np.exp(logits[order].astype(np.float64))
    size = 1 + int(np.searchsorted(np.cumsum(weights) / weights.sum(), top_p))
    assert set(draw_many(logits, 4000, isa, top_p=top_p)) == set(order[:size])


@per_isa
@pytest.mark.parametrize("top_p, left", [(0.3, 3), (0.31, 4), (0.1, 1), (1e-300, 1), (0.9, 9), (1.0, 10)])
def test_top_p_among_equals_keeps_the_lowest_ids(top_p: float, left: int, isa: str) -> None:
    logits = np.full(30, -np.inf, dtype=np.float32)
    logits[::3] = 2.5
    assert sorted(set(draw_many(logits, 1000, isa, top_p=top_p).tolist())) == list(range(0, 3 * left, 3))


@per_isa
@pytest.mark.parametrize("top_k", [1, 3, 64, 65, 999])
def test_top_k_among_equals_keeps_the_lowest_ids(top_k: int, isa: str) -> None:
    logits = np.zeros(1000, dtype=np.float32)
    logits[::2] = -0.0
    assert draw_many(logits, 8000, isa, top_k=top_k).max() == top_k - 1
    assert draw_many(logits, 500, isa, top_k=top_k, top_p=0.5).max() < max(1, (top_k + 1) // 2)


@per_isa
def test_the_lowest_id_wins_a_tie(isa: str) -> None:
    for count in (1, 20, 64, 200):
        for first in (0, count // 3, count // 2, count - 1):
            logits = np.full(count, -1.0, dtype=np.float32)
            logits[first:] = 4.0
            assert Case(logits, temperature=0.0).token(isa) == first
    assert Case(np.array([-0.0, 0.0], dtype=np.float32), temperature=0.0).token(isa) == 0


@per_isa
def test_order_is_of_logits_not_of_scores(isa: str) -> None:
    """The one difference from Python: these logits' distances from the best are equal in float64, yet they differ."""
    logits = np.array([1e-40, 2e-40, 1.0, 2e-40], dtype=np.float32)
    assert set(draw_many(logits, 300, isa, top_k=2)) == {1, 2}


@per_isa
def test_place_in_memory_and_in_a_batch_change_nothing(isa: str) -> None:
    rng = np.random.default_rng(2)
    count, padded = 1003, 1024
    rows = np.full((33, padded), np.nan, dtype=np.float32)  # what pads the vocabulary is never read
    made = [random_case(rng, count) for _ in rows]
    for row, case in zip(rows, made, strict=True):
        row[:count] = case.logits
    alone = [case.token(isa) for case in made]
    names = ("temperature", "top_p", "min_p", "top_k", "seed", "position")
    settings = {name: [getattr(case, name) for case in made] for name in names}
    assert native.sample(rows, **settings, count=count, isa=isa).tolist() == alone
    backward = {name: values[::-1] for name, values in settings.items()}
    assert native.sample(rows[::-1].copy(), **backward, count=count, isa=isa).tolist() == alone[::-1]
    memory = np.empty(count + 16, dtype=np.float32)
    for case, token in zip(made, alone, strict=True):
        best = native.logprobs(case.logits, 0, 7, isa)
        for offset in range(17):
            case.logits, memory[offset : offset + count] = memory[offset : offset + count], case.logits.copy()
            assert case.token(isa) == token
            again = native.logprobs(case.logits, 0, 7, isa)
            assert again[:2] == best[:2] and again[2].tolist() == best[2].tolist()
            case.logits = case.logits.copy()


@per_isa
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_token(value: float, isa: str) -> None:
    logits = np.random.default_rng(0).standard_normal(150).astype(np.float32)
    for place in range(150):
        bad = logits.copy()
        bad[place] = value
        for temperature in (0.0, 1.0):
            assert Case(bad, temperature=temperature, top_k=3, top_p=0.5).token(isa) == -1
        assert math.isnan(native.logprobs(bad, 0, 3, isa)[0]) and len(native.logprobs(bad, 0, 3, isa)[2]) == 0


@per_isa
def test_forbidden_tokens(isa: str) -> None:
    for count in (1, 16, 150):
        logits = np.full(count, -np.inf, dtype=np.float32)
        assert Case(logits).token(isa) == Case(logits, temperature=0.0).token(isa) == -1
        logits[count - 1] = -5.0
        for temperature in (0.0, 1.0, 1e9):
            assert Case(logits, temperature=temperature, top_k=2, top_p=0.9).token(isa) == count - 1


@per_isa
@pytest.mark.parametrize("count", [1, 5, 64, 100, 4097, VOCAB])
def test_logprobs(count: int, isa: str) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20 if count < VOCAB else 5):
        logits = random_logits(rng, count)
        token = int(rng.integers(count))
        wide = logits.astype(np.float64)
        expected = wide.max() + math.log(np.exp(wide - wide.max()).sum())
        order = np.argsort(-wide, kind="stable")
        order = order[wide[order] > -np.inf]
        for num_best in (0, 1, 5, 64, 65, 1000, VOCAB + 1):
            shift, rank, ids, values = native.logprobs(logits, token, num_best, isa)
            assert shift == pytest.approx(expected, abs=1e-6, rel=1e-15)
            assert rank == 1 + np.count_nonzero(logits > logits[token])
            assert ids.tolist() == order[:num_best].tolist()
            assert values.tolist() == (wide[ids] - shift).tolist()


@per_isa
def test_logprobs_of_sums_that_are_long(isa: str) -> None:
    """Many small weights beside a large one, where a sum in float32 would stand still."""
    logits = np.full(VOCAB, -18.0, dtype=np.float32)
    logits[7] = 0.0
    expected = math.log1p((VOCAB - 1) * math.exp(-18.0))
    assert native.logprobs(logits, 7, 0, isa)[0] == pytest.approx(expected, abs=1e-9)


@per_isa
def test_exp(isa: str) -> None:
    values = np.random.default_rng(1).uniform(-104.0, 88.0, 2003).astype(np.float32)
    values[:6] = [0.0, -np.inf, np.inf, -200.0, 100.0, np.nan]
    result = native.exp(values, isa)
    assert result[:5].tolist() == [1.0, 0.0, np.inf, 0.0, np.inf] and np.isnan(result[5])
    exact = np.exp(values[6:].astype(np.float64))
    assert np.all(np.abs(result[6:] - exact) <= 2 * np.spacing(result[6:]))
    for start in (0, 1, 7, 1990):
        for stop in (start + 1, start + 5, 2003):
            assert np.array_equal(native.exp(values[start:stop], isa), result[start:stop], equal_nan=True)
    assert len(native.exp(values[:0], isa)) == 0


ROW = np.zeros(10, dtype=np.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"position": -1},
        {"position": 2**32},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"logits": ROW[:0]},
        {"logits": ROW.astype(np.float64)},
        {"logits": ROW[::2]},
        {"logits": ROW[None]},
        {"isa": "none such"},
    ],
)
def test_what_draw_refuses(change: dict[str, object]) -> None:
    fine: dict[str, object] = {"logits": ROW, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    fine |= {"seed": 0, "position": 0, "isa": ISAS[0]}
    native.draw(**fine)
    with pytest.raises(ValueError):
        native.draw(**(fine | change))


@pytest.mark.parametrize(
    "change",
    [{"count": 0}, {"count": 11}, {"count": -1}, {"top_k": [0]}, {"seed": [0] * 3}, {"temperature": [1.0, -1.0]}],
)
def test_what_sample_refuses(change: dict[str, object]) -> None:
    fine: dict[str, object] = {"logits": np.zeros((2, 10), dtype=np.float32), "temperature": [1.0, 0.0]}
    fine |= {"top_p": [1.0, 1.0], "min_p": np.zeros(2), "top_k": np.zeros(2, dtype=np.int64), "seed": [1, -1]}
    fine |= {"position": [4, 5], "count": 10, "isa": ISAS[0]}
    assert len(native.sample(**fine)) == 2
    with pytest.raises(ValueError):
        native.sample(**(fine | change))


@pytest.mark.parametrize("token, num_best", [(-1, 1), (10, 1), (0, -1)])
def test_what_logprobs_refuses(token: int, num_best: int) -> None:
    with pytest.raises(ValueError):
        native.logprobs(ROW, token, num_best, ISAS[0])
    with pytest.raises(ValueError):
        native.random_words(0, 0, np.array([-1]), ISAS[0])
    with pytest.raises(ValueError):
        native.exp(ROW.astype(np.float64), ISAS[0])
