"""The fake executor catches a core that breaks the plan protocol."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import CachedRequestData, NewRequestData, SchedulerOutput
from evensong.testing.fake_executor import FakeExecutor, scripted_token

NONE = CachedRequestData()
STEP_IDS = itertools.count(1)


@pytest.fixture
def executor() -> Iterator[FakeExecutor]:
    executor = FakeExecutor()
    executor.initialize_from_config(KVCacheConfig(4, 2), 8)
    yield executor
    executor.shutdown()


def new(request_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(request_id, tokens, [], SamplingParams(logprobs=1), [], blocks, computed)


def step(
    executor: FakeExecutor,
    news: list[NewRequestData],
    cached: CachedRequestData,
    counts: dict[str, int],
    sampling: list[str],
    released: list[str] | None = None,
) -> list[list[int]]:
    plan = SchedulerOutput(next(STEP_IDS), news, cached, counts, sampling, released or [])
    executor.execute_model(plan).result()
    return executor.sample_tokens(None).result().sampled_token_ids


def test_tokens_depend_on_all_tokens_before(executor: FakeExecutor) -> None:
    first = step(executor, [new("a", [1, 2, 3], [0, 1])], NONE, {"a": 3}, ["a"])
    assert first == [[scripted_token([1, 2, 3])]]
    second = step(executor, [], CachedRequestData(["a"], [[]], [3]), {"a": 1}, ["a"])
    assert second == [[scripted_token([1, 2, 3, first[0][0]])]]
    assert executor.num_computed_tokens == 4


def test_a_shared_block_may_be_read(executor: FakeExecutor) -> None:
    step(executor, [new("a", [1, 2, 3], [0, 1])], NONE, {"a": 3}, ["a"])
    assert step(executor, [new("b", [1, 2, 9], [0, 2], 2)], NONE, {"b": 1}, ["b"]) == [[scripted_token([1, 2, 9])]]


def start_a(executor: FakeExecutor) -> None:
    step(executor, [new("a", [1, 2, 3], [0, 1])], NONE, {"a": 3}, ["a"])


BREACHES: dict[str, Callable[[FakeExecutor], object]] = {
    "reads keys that are not its own": lambda e: step(e, [new("b", [5, 2, 9], [0, 2], 2)], NONE, {"b": 1}, ["b"]),
    "lacks blocks": lambda e: step(e, [new("b", [5, 2, 9], [2])], NONE, {"b": 3}, ["b"]),
    "computes tokens that do not exist": lambda e: step(e, [new("b", [5, 2], [2, 3])], NONE, {"b": 3}, ["b"]),
    "sampling disagrees": lambda e: step(e, [new("b", [5, 2], [2])], NONE, {"b": 2}, []),
    "holds a slot already": lambda e: step(e, [new("a", [5, 2], [2])], NONE, {"a": 2}, ["a"]),
    "plan says 2": lambda e: step(e, [], CachedRequestData(["a"], [[]], [2]), {"a": 1}, ["a"]),
    "is scheduled for no token": lambda e: step(e, [], CachedRequestData(["a"], [[]], [3]), {"a": 0}, ["a"]),
    "holds a block twice": lambda e: step(e, [new("b", [5, 2, 9], [2, 2])], NONE, {"b": 3}, ["b"]),
}


@pytest.mark.parametrize("message", BREACHES)
def test_breaches_are_caught(executor: FakeExecutor, message: str) -> None:
    start_a(executor)
    with pytest.raises(AssertionError, match=message):
        BREACHES[message](executor)


def test_a_block_that_was_overwritten_is_noticed(executor: FakeExecutor) -> None:
    start_a(executor)
    with pytest.raises(AssertionError, match="a reads keys"):
        step(
            executor,
            [new("b", [7, 7], [0])],
            CachedRequestData(["a"], [[]], [3]),
            {"b": 2, "a": 1},
            ["b", "a"],
        )


def test_it_fails_when_told() -> None:
    executor = FakeExecutor(fail_at_step=1)
    executor.initialize_from_config(KVCacheConfig(4, 2), 8)
    with pytest.raises(RuntimeError, match="as told"):
        step(executor, [new("a", [1], [0])], NONE, {"a": 1}, ["a"])
    reasons: list[str] = []
    executor.register_failure_callback(reasons.append)
    executor.fail("gone")
    assert reasons == ["gone"]
    executor.shutdown()
