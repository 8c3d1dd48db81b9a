"""SamplingParams: what can never be right is refused by name; what is right keeps its meaning on the wire."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import SamplingParams

BAD: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 1.5, True, "2", 2**64]),
    ("temperature", [-0.1, math.nan, math.inf, "hot", True, 10**400]),
    ("top_p", [0, 1.1, -1, math.nan, None]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("top_k", [-2, 1.5, True, "all"]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.inf]),
    ("repetition_penalty", [0, -1, math.nan, 1e9]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "7", True]),
    ("max_tokens", [0, -5, 1.5, True]),
    ("min_tokens", [-1, 0.5, 17]),
    ("logprobs", [-1, 1.5, True]),
    ("prompt_logprobs", [-1, 1.5, True, 2**63]),
    ("truncate_prompt_tokens", [0, -2, 1.5, True, 2**63]),
    ("stop", ["", ["a", ""], 5, [5], ["x"] * 10_000, "\ud800"]),
    ("stop_token_ids", [5, [-1], [1.5], ["1"], [True]]),
    ("allowed_token_ids", [[], 5, [-1], [1.5], ["1"], [True], [2**31]]),
    ("logprob_token_ids", [5, [-1], [1.5], [True], list(range(129))]),
    ("bad_words", ["word", ["a", ""], [" "], ["\u3000\n"], 5, [5], ["x"] * 129, ["\ud800"], ["x" * 257]]),
    ("logit_bias", [[1], {"x": 1}, {"-": 1}, {-1: 1}, {1: 101}, {1: math.nan}, {1: "2"}, {"9" * 30: 1}]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD for value in values])
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and caught.value.status == 400
    assert len(str(caught.value)) < 200


def test_the_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1.0, top_k=-1, seed=-(2**63), max_tokens=1, min_tokens=1, logprobs=0)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, seed=2**63 - 1, max_tokens=None, min_tokens=10**6)
    SamplingParams(bad_words=["x" * 256] * 128, allowed_token_ids=list(range(200_000)))


def test_forms_are_made_one() -> None:
    params = SamplingParams(stop="end", logit_bias={"5": 1, 6: -100}, temperature=1)  # type: ignore[dict-item]
    assert params.stop_strings == ["end"]
    assert params.logit_bias == {5: 1.0, 6: -100.0}
    assert SamplingParams(stop=[], logit_bias={}).stop_strings == []
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-12).greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_the_wire_and_copies_keep_every_field() -> None:
    params = SamplingParams(n=2, seed=5, stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3], logprobs=4, min_p=0.1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    copy = params.clone()
    copy.seed = 6
    assert params.seed == 5 and copy.n == 2
