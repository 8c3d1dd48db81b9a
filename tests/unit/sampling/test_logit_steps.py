"""logit_bias, min_tokens and penalties against their definitions, one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling import allowed, bad_words, bias, min_tokens, penalties
from evensong.sampling.row import SamplingRow

VOCAB = 12


def apply(step: Any, prompt: list[int], output: list[int], eos: tuple[int, ...] = (), **params: Any) -> list[float]:
    logits = np.linspace(-3, 3, VOCAB).astype(np.float32)
    row = SamplingRow(SamplingParams(**params), np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64), eos)
    assert step.wanted(row.params)
    step.apply(row, logits)
    as_lists = np.linspace(-3, 3, VOCAB).astype(np.float32)
    step.apply(SamplingRow(row.params, prompt, output, eos), as_lists)
    assert np.array_equal(as_lists, logits)
    return logits.tolist()


BASE = np.linspace(-3, 3, VOCAB).astype(np.float32).tolist()
TOKENS = st.lists(st.integers(0, VOCAB + 3), max_size=30)


@given(TOKENS, TOKENS, st.sampled_from([1.0, 0.5, 1.3, 1e-6, 1e6]), st.floats(-2, 2), st.floats(-2, 2))
@settings(deadline=None, max_examples=200)
def test_penalties(prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float) -> None:
    if repetition == 1.0 and not presence and not frequency:
        assert not penalties.wanted(SamplingParams())
        return
    result = apply(
        penalties,
        prompt,
        output,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    for token_id in range(VOCAB):
        value = BASE[token_id]
        if token_id in prompt or token_id in output:
            value = value / repetition if value > 0 else value * repetition
        if token_id in output:
            value -= frequency * output.count(token_id) + presence
        assert result[token_id] == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_a_penalised_minus_infinity_stays_forbidden() -> None:
    logits = np.array([-np.inf, 1.0], dtype=np.float32)
    row = SamplingRow(SamplingParams(repetition_penalty=0.5, presence_penalty=-2.0), [0], [0], ())
    penalties.apply(row, logits)
    assert logits[0] == -np.inf


@pytest.mark.parametrize("produced, banned", [(0, True), (2, True), (3, False), (9, False)])
def test_min_tokens_bans_what_ends_a_request(produced: int, banned: bool) -> None:
    result = apply(min_tokens, [1], [1] * produced, (2, 3), min_tokens=3, stop_token_ids=[5, 1000])
    expected = {2, 3, 5} if banned else set()
    assert {i for i, value in enumerate(result) if value == -np.inf} == expected


def test_min_tokens_leaves_an_ignored_eos() -> None:
    result = apply(min_tokens, [1], [], (2,), min_tokens=3, ignore_eos=True)
    assert result == BASE


def test_bias_is_added_once() -> None:
    result = apply(bias, [1], [], logit_bias={0: 100.0, 3: -1.5, 500: 7.0})
    expected = list(BASE)
    expected[0] = float(np.float32(BASE[0]) + np.float32(100))
    expected[3] = float(np.float32(BASE[3]) - np.float32(1.5))
    assert result == expected


def banned(result: list[float]) -> set[int]:
    return {i for i, value in enumerate(result) if value == -np.inf}


def test_only_allowed_tokens_keep_their_logits() -> None:
    result = apply(allowed, [1], [2], allowed_token_ids=[3, 0, 500])
    assert banned(result) == set(range(VOCAB)) - {0, 3}
    assert (result[0], result[3]) == (BASE[0], BASE[3])


@pytest.mark.parametrize(
    "output, expected",
    [([], {7}), ([1], {2, 7}), ([0, 1], {2, 7}), ([1, 2], {3, 7}), ([2, 1], {2, 7}), ([1, 0], {7}), ([8, 8], {7, 8})],
)
def test_the_last_token_of_a_bad_word_is_banned_where_the_others_stand(output: list[int], expected: set[int]) -> None:
    words = [[7], [1, 2], [1, 2, 3], [8, 8, 8], [1, 500]]
    result = apply(bad_words, [1, 1, 8], output, bad_words_token_ids=words)
    assert banned(result) == expected
    left = sorted(set(range(VOCAB)) - expected)
    assert [result[i] for i in left] == [BASE[i] for i in left]


def test_steps_that_are_not_wanted() -> None:
    plain = SamplingParams()
    assert not any(step.wanted(plain) for step in (bias, allowed, bad_words, min_tokens, penalties))
