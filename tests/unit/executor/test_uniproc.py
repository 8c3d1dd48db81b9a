"""The uniprocess executor: one thread runs the worker, steps do not block, failures reach who asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from evensong.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from evensong.executor.uniproc import UniProcExecutor
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.step import CachedRequestData, SchedulerOutput
from tests.unit.executor.fake_worker import RecordingWorker

FAKE = "tests.unit.executor.fake_worker:RecordingWorker"


@pytest.fixture
def executor() -> Iterator[UniProcExecutor]:
    executor = UniProcExecutor(EngineConfig(), FAKE)
    yield executor
    executor.shutdown()


def plan(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, [], CachedRequestData(), {}, [], [])


def test_every_verb_runs_in_one_thread_in_order(executor: UniProcExecutor) -> None:
    assert executor.get_kv_cache_specs()[0][0].head_dim == 8
    assert executor.determine_available_memory() == [1000]
    assert executor.get_model_limits().vocab_size == 20
    executor.initialize_from_config(KVCacheConfig(3, 4), 12)
    assert executor.measure_token_rate() == 5.0
    assert executor.describe() == {"weights": "none"}
    executor.execute_model(plan(1))
    assert executor.sample_tokens(None).result().sampled_token_ids == [[3]]
    assert executor.collective_rpc("get_calls")[0] == [
        "init",
        "specs",
        "memory",
        "limits",
        "initialize 3 12",
        "rate",
        "describe",
        "execute 1",
        "sample",
        "take",
    ]
    assert executor.collective_rpc("get_num_threads") == [1]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_more_is_in_flight_where_one_is_planned_ahead(ahead: bool) -> None:
    executor = UniProcExecutor(EngineConfig(scheduler=SchedulerConfig(async_scheduling=ahead)), FAKE)
    assert executor.max_concurrent_batches == 1 + ahead
    executor.shutdown()


def test_a_step_does_not_block_the_caller(executor: UniProcExecutor) -> None:
    gate = executor._worker.gate
    gate.clear()
    forward, sampled = executor.execute_model(plan(1)), executor.sample_tokens(None)
    time.sleep(0.02)
    assert not forward.done() and not sampled.done()
    gate.set()
    assert forward.result(10) is None
    assert sampled.result(10).request_ids == ["a"]


def test_a_failed_step_fails_its_future_and_no_other(executor: UniProcExecutor) -> None:
    with pytest.raises(RuntimeError, match="the step failed"):
        executor.execute_model(plan(-1)).result(10)
    assert executor.execute_model(plan(2)).result(10) is None


def test_rpc(executor: UniProcExecutor) -> None:
    assert executor.collective_rpc("add", args=(2, 3)) == [5]
    with pytest.raises(KeyError, match="wrong"):
        executor.collective_rpc("fail")
    with pytest.raises(TimeoutError):
        executor.collective_rpc("sleep", 0.05, (0.3,))


@pytest.mark.parametrize("name", ["_note", "__init__", "__class__", "nothing", "number", ""])
def test_rpc_reaches_public_methods_only(executor: UniProcExecutor, name: str) -> None:
    with pytest.raises(AttributeError, match="has no method"):
        executor.collective_rpc(name)


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(ValueError, match="cannot load"):
        UniProcExecutor(EngineConfig(model=ModelConfig(model="broken")), FAKE)


def test_shutdown_twice_frees_the_worker() -> None:
    executor = UniProcExecutor(EngineConfig(), FAKE)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(AttributeError):
        executor.collective_rpc("add", args=(1, 2))


def test_the_module_does_not_import_torch() -> None:
    source = sys.modules["evensong.executor.uniproc"]
    assert not hasattr(source, "torch")


def test_a_worker_whose_steps_run_elsewhere_is_called_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step starts at once; the wait is the asker's; what either raises is its future's."""
    monkeypatch.setattr(RecordingWorker, "steps_run_elsewhere", True, raising=False)
    executor = UniProcExecutor(EngineConfig(), FAKE)
    try:
        before = executor.collective_rpc("get_num_threads")[0]
        forward = executor.execute_model(plan(3))
        assert executor.collective_rpc("get_calls")[0][-1] == "execute 3"
        output = executor.sample_tokens(None)
        assert executor.collective_rpc("get_calls")[0][-1] == "sample", "nobody has asked yet"
        assert forward.result() is None and output.result().request_ids == ["a"]
        assert output.result().request_ids == ["a"]
        assert executor.collective_rpc("get_calls")[0].count("take") == 1
        assert executor.collective_rpc("get_num_threads")[0] == before + 1
        failed = executor.execute_model(plan(-1))
        with pytest.raises(RuntimeError, match="the step failed"):
            failed.result()
    finally:
        executor.shutdown()
