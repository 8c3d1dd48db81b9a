"""The sampler as a whole: a row's token and logprobs are its own, forbidden tokens never come, bad rows fail alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.gumbel import noise_of, random_words
from evensong.sampling.host_draws import sample_rows
from evensong.sampling.row import SamplingRow
from evensong.sampling.sampler import NO_TOKEN, Sampled

PADDED, VOCAB = 144, 137
EOS = (2, 3)


def logits_of(seed: int, spread: float = 3.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    row = (np.random.default_rng(seed).standard_normal(PADDED) * spread).astype(np.float32)
    row[VOCAB:] = 50.0  # padding that looks better than any token
    return row


def sample_one(logits: np.ndarray[Any, Any], row: SamplingRow) -> Sampled:
    return sample_rows(logits[None].copy(), [row], VOCAB)[0]


def make_row(data: int = 0, output: int = 5, /, **params: Any) -> SamplingRow:
    rng = np.random.default_rng(data)
    return SamplingRow(SamplingParams(**params), rng.integers(0, VOCAB, 20), rng.integers(0, VOCAB, output), EOS)


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], SamplingRow]:
    params: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 1e-12, 0.3, 1.0, 2.0])),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "logprobs": draw(st.sampled_from([None, 0, 3])),
        "max_tokens": 100,
    }
    for name, values in {
        "top_p": [1e-4, 0.5, 0.95],
        "top_k": [1, 3, 40, 10**7],
        "min_p": [0.05, 0.5],
        "repetition_penalty": [0.7, 1.3],
        "presence_penalty": [-1.0, 1.5],
        "frequency_penalty": [-0.4, 0.8],
        "min_tokens": [2, 50],
        "logit_bias": [{2: 100.0}, {5: -100.0, 7: 3.0}],
        "stop_token_ids": [[11, 12]],
        "allowed_token_ids": [list(range(0, VOCAB, 3)), [4, 5, 30, 31, 136]],
        "bad_words_token_ids": [[[30], [4, 5], [1, 2, 3]], [[i] for i in range(100)]],
    }.items():
        if draw(st.booleans()):
            params[name] = draw(st.sampled_from(values))
    seed = draw(st.integers(0, 50))
    return logits_of(seed), make_row(seed, draw(st.integers(0, 8)), **params)


@given(st.lists(rows(), min_size=1, max_size=9), st.randoms())
@settings(deadline=None, max_examples=80)
def test_a_row_alone_equals_the_row_in_any_batch(
    batch: list[tuple[np.ndarray[Any, Any], SamplingRow]], random: Any
) -> None:
    alone = [sample_one(logits, row) for logits, row in batch]
    random.shuffle(order := list(range(len(batch))))
    logits = np.stack([batch[i][0] for i in order])
    before = logits.copy()
    together = sample_rows(logits, [batch[i][1] for i in order], VOCAB)
    assert together == [alone[i] for i in order]
    assert np.array_equal(logits, before)


@given(rows())
@settings(deadline=None, max_examples=150)
def test_what_is_forbidden_never_comes(drawn: tuple[np.ndarray[Any, Any], SamplingRow]) -> None:
    logits, row = drawn
    result = sample_one(logits, row)
    assert result.error is None and 0 <= result.token_id < VOCAB
    params = row.params
    if len(row.output_token_ids) < params.min_tokens:
        assert result.token_id not in {*EOS, *(params.stop_token_ids or ())}
    assert params.allowed_token_ids is None or result.token_id in params.allowed_token_ids
    text = [*row.output_token_ids, result.token_id]
    assert not any(text[-len(word) :] == word for word in params.bad_words_token_ids or ())
    if result.logprobs is not None:
        assert params.logprobs is not None
        assert result.logprobs.token_ids[0] == result.token_id
        assert len(result.logprobs.token_ids) == 1 + params.logprobs
        assert all(token_id < VOCAB for token_id in result.logprobs.token_ids)
        assert all(math.isfinite(value) for value in result.logprobs.logprobs)
    else:
        assert params.logprobs is None


def naive(logits: np.ndarray[Any, Any], row: SamplingRow) -> int:
    """The whole order in Python numbers: penalties, temperature, min_p, top_k, top_p, noise, argmax."""
    p = row.params
    prompt, output = list(row.prompt_token_ids), list(row.output_token_ids)
    scores: dict[int, float] = {}
    for i in range(VOCAB):
        x = float(logits[i]) + (p.logit_bias or {}).get(i, 0.0)
        if len(output) < p.min_tokens and i in {*EOS, *(p.stop_token_ids or ())}:
            continue
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            continue
        if any([*output, i][-len(word) :] == word for word in p.bad_words_token_ids or ()):
            continue
        if i in prompt or i in output:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        if i in output:
            x -= p.presence_penalty + p.frequency_penalty * output.count(i)
        scores[i] = x
    best = max(scores.values())
    if p.temperature < 1e-9:
        return min(i for i, x in scores.items() if x == best)
    scaled = {i: (x - best) / p.temperature for i, x in scores.items()}
    if p.min_p:
        scaled = {i: x for i, x in scaled.items() if x >= math.log(p.min_p)}
    order = sorted(scaled, key=lambda i: (-scaled[i], i))
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1:
        weights = [math.exp(scaled[i]) for i in order]
        total, reached, count = math.fsum(weights), 0.0, 0
        while count < len(order) and reached < p.top_p * total:
            reached += weights[count]
            count += 1
        order = order[:count]
    position = len(prompt) + len(output)
    words = random_words(p.seed or 0, position, np.arange(VOCAB))
    return max(sorted(order), key=lambda i: scaled[i] + noise_of(int(words[i])))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.3},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.07, "top_k": 30, "top_p": 0.8},
        {"temperature": 1.0, "frequency_penalty": 0.9, "top_p": 0.95},
        {"temperature": 1.0, "min_tokens": 60, "max_tokens": 100, "stop_token_ids": [11, 12]},
        {"temperature": 0.0, "logit_bias": {4: 6.5, 9: -3.0}},
        {"temperature": 1.0, "allowed_token_ids": [4, 5, 30, 31, 136], "logit_bias": {31: 1.5}},
        {"temperature": 0.0, "bad_words_token_ids": [[i] for i in range(0, VOCAB, 2)], "presence_penalty": 0.4},
        {"temperature": 1.0, "allowed_token_ids": [7, 8, 9], "bad_words_token_ids": [[7], [8, 9], [9, 9]]},
    ],
    ids=str,
)
def test_the_whole_order_agrees_with_the_naive_one(params: dict[str, Any]) -> None:
    for seed in range(40):
        row = make_row(seed, seed % 9, seed=seed * 1_000_003, **params)
        logits = logits_of(seed)
        assert sample_one(logits, row).token_id == naive(logits, row), seed


def test_logprobs_are_of_the_raw_distribution() -> None:
    plain = sample_one(logits_of(1), make_row(temperature=0.0, logprobs=4)).logprobs
    biased = sample_one(logits_of(1), make_row(temperature=0.0, logprobs=4, logit_bias={60: 100.0})).logprobs
    assert plain is not None and biased is not None
    assert biased.token_ids[0] == 60 and biased.token_ids[1:] == plain.token_ids[1:]
    assert biased.logprobs[1:] == plain.logprobs[1:]
    assert biased.rank > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, bad: float) -> None:
    row = make_row(temperature=temperature, seed=1, logprobs=2)
    logits = np.stack([logits_of(1), logits_of(2), logits_of(3)])
    expected = sample_rows(logits, [row] * 3, VOCAB)
    logits[1, 40] = bad
    result = sample_rows(logits, [row] * 3, VOCAB)
    assert result[1] == Sampled(-1, error=NO_TOKEN)
    assert [result[0], result[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_value_under_a_ban_is_still_an_error(temperature: float) -> None:
    logits = logits_of(1)
    logits[EOS[0]] = math.nan
    assert sample_one(logits, make_row(temperature=temperature, min_tokens=16, logprobs=1)).error == NO_TOKEN


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e9])
def test_everything_forbidden_is_told_apart_from_a_broken_model(temperature: float) -> None:
    for masks in (
        {"min_tokens": 16, "stop_token_ids": list(range(VOCAB))},
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5], [6]]},
        {"allowed_token_ids": [2], "min_tokens": 16, "repetition_penalty": 1e-6},
    ):
        assert sample_one(logits_of(1), make_row(temperature=temperature, **masks)) == Sampled(-1, exhausted=True)
    assert sample_one(np.full(PADDED, -np.inf, dtype=np.float32), make_row(temperature=temperature)).error == NO_TOKEN
    last = make_row(temperature=temperature, min_tokens=16, stop_token_ids=list(range(VOCAB - 1)))
    assert sample_one(logits_of(1), last).token_id == VOCAB - 1


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros(PADDED, dtype=np.float32)
    logits[[9, 30, 31]] = 2.0
    assert sample_one(logits, make_row(temperature=0.0)).token_id == 9
    assert sample_one(logits, make_row(temperature=0.0, logit_bias={9: -0.5})).token_id == 30


def test_a_row_does_not_depend_on_where_it_lies_in_memory() -> None:
    """The rows of an odd vocabulary start at any alignment."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(VOCAB) * 3).astype(np.float32)
    buffer = np.empty(VOCAB + 64, dtype=np.float32)
    row = make_row(temperature=1.0, seed=5, top_p=0.9, logprobs=5, repetition_penalty=1.1)
    results = []
    for offset in range(33):
        view = buffer[offset : offset + VOCAB]
        view[:] = values
        results.append(sample_rows(view[None], [row], VOCAB)[0])
    assert all(result == results[0] for result in results)


def test_the_same_rows_give_the_same_results_again() -> None:
    row = make_row(temperature=1.0, seed=-5, top_p=0.9)
    first = sample_one(logits_of(7), row)
    assert sample_one(logits_of(7), copy.deepcopy(row)) == first
    assert len({sample_one(logits_of(7), make_row(temperature=1.0, seed=s)).token_id for s in range(20)}) > 3
