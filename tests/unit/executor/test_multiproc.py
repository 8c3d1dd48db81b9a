"""The multiprocess executor with real processes and scripted ranks: order, failures, limits, the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from evensong.config.sections import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from evensong.executor.multiproc import MultiprocExecutor
from evensong.protocol.errors import ConfigError, EngineStartError, RequestError
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import CachedRequestData, GrammarBitmask, SchedulerOutput
from evensong.utils.progress import ProgressPage
from tests.unit.executor.rank_worker import CLASS, EXITS, HANGS, LARGE, RAISES, SLOW, WAITS

ROOT = Path(__file__).resolve().parents[3]
Start = Callable[..., MultiprocExecutor]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts executors; at the end every process and descriptor of theirs is gone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = set(os.listdir("/proc/self/fd"))
    made: list[MultiprocExecutor] = []

    def make(tp: int = 1, pp: int = 1, model: str = "fine", seconds: float = 60.0, **more: Any) -> MultiprocExecutor:
        parallel = ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            distributed_executor_backend="mp",
            worker_timeout=seconds,
        )
        config = EngineConfig(model=ModelConfig(model=model, device="cpu"), parallel=parallel, **more)
        made.append(MultiprocExecutor(config, CLASS, replica=3))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
    assert not workers_left(5)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


def workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and "worker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def workers_left(seconds: float) -> list[psutil.Process]:
    until = time.monotonic() + seconds
    while workers() and time.monotonic() < until:
        time.sleep(0.02)
    return workers()


def process_of(rank: int) -> psutil.Process:
    return next(p for p in workers() if p.cmdline()[0].strip() == f"evensong:worker-3.{rank}")


def plan(step_id: int, *, awaits_bitmask: bool = False) -> SchedulerOutput:
    return SchedulerOutput(step_id, [], CachedRequestData(), {}, ["a"], [], awaits_bitmask=awaits_bitmask)


def ready(executor: MultiprocExecutor) -> MultiprocExecutor:
    executor.initialize_from_config(KVCacheConfig(3, 4), 12)
    return executor


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_every_verb_reaches_all_ranks_in_order(start: Start, tp: int, pp: int) -> None:
    executor, count = start(tp, pp), tp * pp
    specs = executor.get_kv_cache_specs()
    assert [[spec.layer for spec in own] for own in specs] == [[index // tp] for index in range(count)]
    assert executor.determine_available_memory() == [1000 * (1 + index) // count for index in range(count)]
    assert executor.get_model_limits().vocab_size == 20
    ready(executor)
    assert executor.measure_token_rate() == 5.0
    threads = ", ".join(str(1 + index) for index in range(count))
    assert executor.describe() == {"weights": "same", "mode": "float32", "threads": threads}
    assert executor.collective_rpc("get_rank") == list(range(count))
    forward, output = executor.execute_model(plan(1)), executor.sample_tokens(None)
    assert forward.result() is None and output.result().sampled_token_ids == [[1]]
    assert output.result(0).request_ids == ["a"], "a result can be asked for again"
    assert executor.collective_rpc("get_calls") == [["initialize 3 12", "execute 1", "sample 1 None"]] * count
    assert executor.use_idle_time() == (count > 1)
    assert executor.max_concurrent_batches == pp + 1


def test_without_async_scheduling_a_batch_a_stage(start: Start) -> None:
    assert start(scheduler=SchedulerConfig(async_scheduling=False)).max_concurrent_batches == 1


def test_steps_in_flight_end_in_order_and_masks_follow_their_plan(start: Start) -> None:
    executor = ready(start(pp=2))
    outputs = []
    for step_id in (SLOW, 2, 3, 4):
        masked = step_id == 3
        executor.execute_model(plan(step_id, awaits_bitmask=masked))
        outputs.append(executor.sample_tokens(GrammarBitmask(["a"], b"12345678") if masked else None))
    assert not outputs[0].done()
    assert outputs[3].result().sampled_token_ids == [[4]], "and all before it have theirs"
    assert [output.done() for output in outputs] == [True] * 4
    assert [output.result().sampled_token_ids[0] for output in outputs] == [[SLOW], [2], [3, 8], [4]]
    # A call runs between steps: those in flight end first.
    output = (executor.execute_model(plan(SLOW)), executor.sample_tokens(None))[1]
    assert executor.collective_rpc("get_calls")[1][-2:] == [f"execute {SLOW}", f"sample {SLOW} None"]
    assert output.done()
    calls = executor.collective_rpc("get_calls")[0]
    assert "sample 3 12345678" in calls and "sample 2 None" in calls


def test_what_is_larger_than_the_rings_goes_both_ways_at_once(start: Start) -> None:
    """The ranks are stuck with an answer that nobody reads yet, while the core writes what they do not read yet."""
    executor = ready(start(tp=2))
    executor.execute_model(plan(LARGE))
    large = executor.sample_tokens(None)
    cached = CachedRequestData(["a"] * 1_500_000)
    executor.execute_model(SchedulerOutput(2, [], cached, {}, ["a"], []))
    after = executor.sample_tokens(None)
    assert large.result().sampled_token_ids == [[LARGE] * 500_000]
    assert after.result().sampled_token_ids == [[2]]
    assert executor.collective_rpc("grow", None, (600_000,)) == [list(range(600_000))] * 2


def test_a_result_has_a_time_limit_of_its_own(start: Start) -> None:
    executor = ready(start())
    executor.execute_model(plan(SLOW))
    output = executor.sample_tokens(None)
    with pytest.raises(TimeoutError):
        output.result(0.01)
    assert output.result(10).sampled_token_ids == [[SLOW]]


def test_calls_and_their_errors(start: Start) -> None:
    executor = ready(start(tp=2))
    assert executor.collective_rpc("fail", args=(5,)) == [5, 5]
    with pytest.raises(KeyError, match="wrong"):
        executor.collective_rpc("fail", args=(-1,))
    with pytest.raises(KeyError, match="rank 1: wrong"):
        executor.collective_rpc("fail", args=(1,))
    assert executor.collective_rpc("check_request", args=(SamplingParams(temperature=0.7),)) == [None, None]
    with pytest.raises(RequestError, match="no such temperature") as caught:
        executor.collective_rpc("check_request", args=(SamplingParams(temperature=0.5),))
    assert caught.value.status == 422 and caught.value.param == "temperature"
    for name in ("_end", "__init__", "nothing", "rank", ""):
        with pytest.raises(AttributeError, match="has no method"):
            executor.collective_rpc(name)
    with pytest.raises(TypeError):
        executor.collective_rpc("cannot_cross")
    assert executor.collective_rpc("get_rank") == [0, 1], "the workers live on"


def test_a_call_that_takes_too_long_for_its_caller_harms_nobody(start: Start) -> None:
    executor = ready(start(tp=2))
    with pytest.raises(TimeoutError, match=r"doze took longer than 0\.05 s on rank 0, 1"):
        executor.collective_rpc("doze", 0.05, (0.4,))
    assert executor.collective_rpc("get_rank") == [0, 1]
    assert not executor._group.replies
    executor.execute_model(plan(1))
    assert executor.sample_tokens(None).result().sampled_token_ids == [[1]]


def test_progress_of_the_ranks_shows_on_the_cores_page(start: Start) -> None:
    executor, page = ready(start(tp=2)), ProgressPage()
    executor.watch_progress(page)
    executor.collective_rpc("doze", None, (1.0,))
    assert 1 <= page.num_ticks <= 10
    page.close()


@pytest.mark.parametrize(
    ("model", "kind", "says"),
    [
        ("config error:1", ConfigError, "^rank 1: the weights are damaged$"),
        ("value error:0", ValueError, "^rank 0: cannot load$"),
        ("killed:1", EngineStartError, "^worker 3.1 killed by SIGKILL$"),
        ("silent:0", EngineStartError, "^worker 3.0 ended with exit code 7$"),
    ],
)
def test_a_rank_that_cannot_start_says_why_and_all_end(
    start: Start, model: str, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        start(tp=2, model=model)
    assert not workers_left(0.5)


def test_alone_its_error_is_its_own(start: Start) -> None:
    with pytest.raises(ConfigError, match="^the weights are damaged$"):
        start(model="config error:0")


def test_ranks_that_hold_different_models_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="mismatched ranks.*weights is 0 on rank 0, 1 on rank 1"):
        start(tp=2, model="mismatched").describe()


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_fails_whoever_waits_at_once(start: Start, victim: int) -> None:
    executor, reasons = ready(start(pp=2)), []
    executor.register_failure_callback(reasons.append)
    steps = [(executor.execute_model(plan(HANGS)), executor.sample_tokens(None))[1]]
    steps.append((executor.execute_model(plan(2)), executor.sample_tokens(None))[1])
    killed = time.monotonic()
    process_of(victim).kill()
    for step in steps:
        with pytest.raises(RuntimeError, match=rf"^worker 3\.{victim} killed by SIGKILL$"):
            step.result()
    assert time.monotonic() - killed < 1
    assert not workers_left(1)
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        executor.execute_model(plan(3)).result()
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        executor.collective_rpc("get_rank")
    assert len(reasons) == 1
    late: list[str] = []
    executor.register_failure_callback(late.append)
    assert late == reasons


def test_kill_9_while_nobody_waits_is_told(start: Start) -> None:
    executor, reasons = ready(start()), []
    executor.register_failure_callback(reasons.append)
    process_of(0).kill()
    until = time.monotonic() + 1
    while not reasons and time.monotonic() < until:
        time.sleep(0.01)
    assert reasons == ["worker 3.0 killed by SIGKILL"]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_meets_the_time_limit(start: Start, victim: int, within: bool) -> None:
    executor = ready(start(pp=2, seconds=1.0))
    if not within:
        process_of(victim).suspend()
    # Its neighbour runs, and waits for it.
    executor.execute_model(plan(WAITS))
    if within:
        while executor._group._plans.unread():
            time.sleep(0.01)
        process_of(victim).suspend()
    with pytest.raises(TimeoutError, match=rf"^rank {victim} did not answer in 1 s"):
        executor.sample_tokens(None).result()
    assert not workers_left(1)


def test_a_call_beyond_the_time_limit_fails_the_engine(start: Start) -> None:
    executor, reasons = ready(start(seconds=0.5)), []
    executor.register_failure_callback(reasons.append)
    with pytest.raises(TimeoutError, match=r"^rank 0 did not answer in 0\.5 s"):
        executor.collective_rpc("doze", 100, (100.0,))
    assert len(reasons) == 1 and not workers_left(1)


@pytest.mark.parametrize(("step_id", "says"), [(RAISES, "the step failed"), (EXITS, "SystemExit: 5")])
def test_a_step_that_fails_ends_all_ranks(start: Start, step_id: int, says: str) -> None:
    executor = ready(start(tp=2))
    executor.execute_model(plan(step_id))
    with pytest.raises(RuntimeError, match=f"rank [01]: {says}"):
        executor.sample_tokens(None).result()
    assert not workers_left(1)


def test_a_rank_that_hangs_is_killed_at_the_end(start: Start) -> None:
    executor = ready(start(tp=2))
    executor.execute_model(plan(HANGS))
    executor.sample_tokens(None)
    began = time.monotonic()
    executor.shutdown()
    executor.shutdown()
    assert time.monotonic() - began < 2.5
    assert not workers()


def test_places_are_set_for_each_worker_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores = sorted(os.sched_getaffinity(0))
    (alone,) = start().collective_rpc("get_place")
    assert alone == {
        "affinity": cores[:1],
        "processors": cores[:1],
        "links": False,
        "group": True,
        "variables": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")},
    }
    places = start(tp=len(cores)).collective_rpc("get_place")
    assert [place["affinity"] for place in places] == [[core] for core in cores]
    assert all(place["links"] == (len(cores) > 1) for place in places)
    assert sorted(os.sched_getaffinity(0)) == cores


PARENT = """
import sys, time
from tests.unit.executor.test_multiproc import ready
from evensong.config.sections import EngineConfig, ModelConfig, ParallelConfig
from evensong.executor.multiproc import MultiprocExecutor
if __name__ == "__main__":
    parallel = ParallelConfig(tensor_parallel_size=2)
    config = EngineConfig(model=ModelConfig(model="fine", device="cpu"), parallel=parallel)
    executor = ready(MultiprocExecutor(config, "tests.unit.executor.rank_worker:RankWorker"))
    print(*(rank.child.pid for rank in executor._group.ranks), flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_with_their_parent_even_when_stopped(stopped: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # A session of its own, as a core has.
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, start_new_session=True, text=True
    )
    children = []
    try:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        if stopped:
            for child in children:
                child.send_signal(signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    gone, alive = psutil.wait_procs(children, 5)
    for child in alive:
        child.kill()
    assert len(gone) == 2 and not alive
