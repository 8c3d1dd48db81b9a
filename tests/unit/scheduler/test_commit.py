"""When a request ends, and what its output says."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.protocol.errors import ErrorBody
from evensong.protocol.output import FinishReason, TokenLogprobs
from evensong.protocol.step import ModelOutput
from evensong.scheduler.commit import commit_tokens, end_without_token, final_output
from evensong.scheduler.request import Request
from tests.unit.scheduler.driving import ask

EOS = {"eos_token_ids": [2]}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "tokens", "kept", "reason", "stop_reason"),
    [
        (EOS, [5, 2, 6], [5, 2], STOP, None),
        (EOS | {"ignore_eos": True}, [5, 2, 6], [5, 2, 6], None, None),
        ({"stop_token_ids": [7]}, [5, 7, 6], [5, 7], STOP, 7),
        (EOS | {"stop_token_ids": [2]}, [2], [2], STOP, None),
        (EOS | {"stop_token_ids": [2], "ignore_eos": True}, [2], [2], STOP, 2),
        (EOS | {"min_tokens": 2}, [2, 5, 2, 5], [2, 5, 2], STOP, None),
        ({"stop_token_ids": [7], "min_tokens": 3}, [7, 7, 7, 7], [7, 7, 7], STOP, 7),
        ({"max_tokens": 3}, [5, 5, 5, 5], [5, 5, 5], LENGTH, None),
        (EOS | {"max_tokens": 2}, [5, 2], [5, 2], STOP, None),
        ({"max_tokens": None}, [5] * 9, [5] * 7, LENGTH, None),
    ],
)
def test_stops(
    fields: dict[str, Any], tokens: list[int], kept: list[int], reason: FinishReason | None, stop_reason: int | None
) -> None:
    request = Request(ask("r", [1, 1, 1], **({"max_tokens": 100} | fields)))
    output = commit_tokens(request, tokens, None, max_model_len=10)
    assert output.new_token_ids == kept == request.token_ids[3:]
    assert (output.finish_reason, output.stop_reason, output.start) == (reason, stop_reason, 0)


def test_indices_and_attempts_go_on_where_a_resumed_request_was() -> None:
    request = Request(ask("r", [1], 6, attempt=3, output_token_ids=[5, 5]))
    row = TokenLogprobs([8], [-1.0], 1)
    first = commit_tokens(request, [8], [row], 100)
    second = commit_tokens(request, [9, 9, 9, 9], [row] * 4, 100)
    assert (first.attempt, first.start, first.new_logprobs) == (3, 2, [row])
    assert (second.start, second.new_token_ids, second.finish_reason) == (3, [9, 9, 9], LENGTH)
    assert second.new_logprobs == [row] * 3
    last = final_output(request, FinishReason.ERROR, ErrorBody("why"))
    assert (last.start, last.new_token_ids, last.error) == (6, [], ErrorBody("why"))


def test_a_request_that_could_not_be_sampled_ends_alone() -> None:
    step = ModelOutput(["broken", "bare", "fine"], [[], [], [5]], [None] * 3, {"broken": "why"}, ["bare"])
    requests = {name: Request(ask(name, [1])) for name in step.request_ids}
    ends = {name: end_without_token(request, step) for name, request in requests.items()}
    assert ends["fine"] is None
    broken, bare = ends["broken"], ends["bare"]
    assert broken is not None and broken.error is not None and broken.error.status == 500
    assert bare is not None and (bare.finish_reason, bare.error) == (STOP, None)
    assert bare.stop_reason == "no_token_allowed" and bare.new_token_ids == []
