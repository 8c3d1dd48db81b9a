"""extra_args: any JSON within the bounds, nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.extra_args import MAX_CHARS, MAX_VALUES
from evensong.protocol.sampling_params import SamplingParams


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


GOOD: list[Any] = [
    {"a": None, "b": True, "c": -(2**63), "d": 2**64 - 1, "e": 1.5, "f": "é👋", "g": [1, ["x"], {"y": {}}]},
    {"a": [0] * (MAX_VALUES - 2)},
    {"a": "x" * (MAX_CHARS - 1)},
    {"a": nested(7)},
]


@pytest.mark.parametrize("value", GOOD, ids=range(len(GOOD)))
def test_json_passes_and_travels(value: Any) -> None:
    params = SamplingParams(extra_args=value)
    assert params.extra_args == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_nothing_is_nothing() -> None:
    assert SamplingParams(extra_args={}).extra_args is None


BAD: list[Any] = [
    [1],
    "a",
    {1: 2},
    {"a": 2**64},
    {"a": -(2**63) - 1},
    {"a": float("nan")},
    {"a": [float("inf")]},
    {"a": "\ud800"},
    {"\udfff": 1},
    {"a": object()},
    {"a": b"x"},
    {"a": {1, 2}},
    {"a": [0] * MAX_VALUES},
    {"a": "x" * MAX_CHARS},
    {"a": nested(8)},
]


@pytest.mark.parametrize("value", BAD, ids=range(len(BAD)))
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(extra_args=value)
    assert (caught.value.param, caught.value.status) == ("extra_args", 400)
