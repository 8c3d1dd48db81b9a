"""Repetition: against a search that tries everything."""

from __future__ import annotations

import random

import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.output import FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import RepetitionDetectionParams, SamplingParams
from evensong.scheduler.commit import REPETITION_DETECTED, commit_tokens
from evensong.scheduler.repetition import repeats
from evensong.scheduler.request import Request


def naive(output: list[int], params: RepetitionDetectionParams) -> bool:
    return any(
        len(output) >= size * params.min_count
        and output[-size * params.min_count :] == output[-size:] * params.min_count
        for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    )


def test_it_agrees_with_the_naive_search() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(4000):
        most = rng.randint(0, 5)
        params = RepetitionDetectionParams(most, rng.randint(0, most), rng.randint(2, 4))
        prompt = [rng.randrange(2) for _ in range(rng.randrange(8))]
        output = [rng.randrange(2) for _ in range(rng.randrange(16))]
        if output:
            expected = naive(output, params)
            found += expected
            assert repeats(prompt + output, len(output), params) is expected, (prompt, output, params)
    assert 400 < found < 3600


def test_it_ends_a_request_as_soon_as_it_holds() -> None:
    params = SamplingParams(
        seed=1, repetition_detection=RepetitionDetectionParams(3, 2, 3), min_tokens=8, max_tokens=99
    )
    request = Request(EngineCoreRequest("r", [1, 2, 1, 2], params))
    reasons = [commit_tokens(request, [token], None, 200) for token in [1, 2, 1, 2, 1, 2, 1, 2]]
    # Six tokens would do, but eight are the least.
    assert [r.finish_reason for r in reasons] == [None] * 7 + [FinishReason.STOP]
    assert reasons[-1].stop_reason == REPETITION_DETECTED


@pytest.mark.parametrize(
    "given",
    [{"max_pattern_size": 257, "min_count": 2}, {"max_pattern_size": 2}, {"size": 1}, {"min_count": "2"}, 3, []],
)
def test_what_cannot_be_is_refused(given: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]  # as a body may hold it
    assert caught.value.param == "repetition_detection"
