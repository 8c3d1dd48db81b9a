"""Deadlines: whose time is over, from which clock, and what the core does with them."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from evensong.engine.core.core import EngineCore
from evensong.engine.core.deadlines import QUEUE_TIMEOUT, TIMEOUT, Deadlines
from evensong.engine.core.gate import Standing
from evensong.engine.core.inbox import Add, Inbox, Shutdown
from evensong.engine.core.loop import CoreLoop
from evensong.protocol.output import EngineCoreOutput, EngineCoreOutputs, FinishReason
from evensong.scheduler.request import Request, RequestStatus
from tests.unit.engine.core.making import ask, make_core


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(*limits: float | None) -> tuple[Deadlines, Clock]:
    clock = Clock()
    return Deadlines(*limits, clock=clock), clock


def overdue(deadlines: Deadlines, clock: Clock, seconds: float) -> list[tuple[str, str]]:
    clock.now += seconds
    return deadlines.overdue()


def test_without_any_limit_no_clock_is_asked() -> None:
    def never() -> float:
        raise AssertionError("nobody asked for a limit")

    deadlines = Deadlines(clock=never)
    deadlines.watch(Request(ask("r")))
    assert deadlines.overdue() == []


def test_the_shorter_of_both_limits_holds_and_each_is_named_once() -> None:
    deadlines, clock = make(10.0)
    deadlines.watch(Request(ask("own", timeout=2.0)))
    deadlines.watch(Request(ask("servers", timeout=50.0)))
    assert overdue(deadlines, clock, 1.9) == []
    assert overdue(deadlines, clock, 0.2) == [("own", TIMEOUT)]
    assert overdue(deadlines, clock, 7.8) == []
    assert overdue(deadlines, clock, 0.2) == [("servers", TIMEOUT)]
    assert overdue(deadlines, clock, 100) == []


def test_time_since_arrival_counts_and_a_clock_ahead_gives_no_more() -> None:
    deadlines, clock = make(10.0)
    deadlines.watch(Request(ask("late", arrival_time=time.time() - 9)))
    deadlines.watch(Request(ask("ahead", arrival_time=time.time() + 3600)))
    assert overdue(deadlines, clock, 2) == [("late", TIMEOUT)]
    assert overdue(deadlines, clock, 8.1) == [("ahead", TIMEOUT)]


def test_the_queue_limit_is_for_those_that_have_not_begun() -> None:
    deadlines, clock = make(None, 5.0)
    begun, waiting = Request(ask("begun")), Request(ask("waiting"))
    deadlines.watch(begun)
    deadlines.watch(waiting)
    begun.run(0, 1)
    begun.wait(2)  # preempted: it waits again, but it has begun
    assert overdue(deadlines, clock, 6) == [("waiting", QUEUE_TIMEOUT)]


def test_requests_that_ended_in_time_are_forgotten() -> None:
    deadlines, clock = make(1e6)
    for n in range(1000):
        request = Request(ask(f"r{n}"))
        deadlines.watch(request)
        request.status = RequestStatus.FINISHED
    assert len(deadlines._heap) < 200
    assert overdue(deadlines, clock, 2e6) == []


def core_with_clock(**settings: Any) -> tuple[EngineCore, Clock]:
    core, clock = make_core(**settings), Clock()
    core.deadlines._clock = clock
    return core, clock


def test_a_request_over_its_time_ends_with_what_it_has_and_gives_its_blocks_back() -> None:
    core, clock = core_with_clock()
    core.add_request(ask("r", max_tokens=100, timeout=5.0))
    core.add_request(ask("other", max_tokens=100))
    outputs, _ = core.step()
    assert [len(o.new_token_ids) for o in outputs[0]] == [1, 1]
    owned = core.scheduler.kv_cache.pool.num_owned
    clock.now += 6
    outputs, model_ran = core.step()
    first = outputs[0][0]
    assert (first.request_id, first.finish_reason, first.stop_reason) == ("r", FinishReason.ABORT, TIMEOUT)
    assert first.new_token_ids == [] and first.start == 1 and model_ran
    assert core.scheduler.kv_cache.pool.num_owned < owned and list(core.scheduler.requests) == ["other"]
    core.shutdown()


def test_a_request_that_waited_too_long_ends_without_having_run() -> None:
    core, clock = core_with_clock(max_num_seqs=1, queue_timeout=5.0)
    core.add_request(ask("runs", max_tokens=100))
    core.add_request(ask("waits", max_tokens=100, client_index=1))
    core.step()
    clock.now += 6
    outputs, _ = core.step()
    assert [(o.request_id, o.stop_reason) for o in outputs[1]] == [("waits", QUEUE_TIMEOUT)]
    assert list(core.scheduler.requests) == ["runs"]
    core.shutdown()


@pytest.mark.parametrize("setting", ["request_timeout", "queue_timeout"])
def test_the_last_request_may_end_so_without_a_step(setting: str) -> None:
    core, clock = core_with_clock(**{setting: 5.0})
    core.add_request(ask("r"))
    clock.now += 6
    outputs, model_ran = core.step()
    assert not model_ran and [o.finish_reason for o in outputs[0]] == [FinishReason.ABORT]
    assert not core.scheduler.has_requests()
    core.shutdown()


def test_a_refused_request_is_not_watched() -> None:
    core, _ = core_with_clock(request_timeout=5.0)
    assert core.add_request(ask("r", [1] * 300)).refusal is not None
    assert core.deadlines._heap == []
    core.shutdown()


def test_what_a_pause_holds_back_still_runs_out_of_time() -> None:
    """The loop wakes for it, though no message comes."""
    core, inbox, sent = make_core(), Inbox(), SimpleQueue[EngineCoreOutputs]()
    thread = threading.Thread(target=CoreLoop(core, inbox, lambda client, message: sent.put(message)).run)
    thread.start()
    try:
        core.gate.close(Standing.SHUT)
        inbox.put(Add(0, ask("held", timeout=0.2)))
        outputs: list[EngineCoreOutput] = []
        while not outputs:
            outputs = sent.get(timeout=20).outputs
        assert [(o.request_id, o.stop_reason, o.new_token_ids) for o in outputs] == [("held", TIMEOUT, [])]
    finally:
        inbox.put(Shutdown(0.0))
        thread.join(20)
        core.shutdown()
    assert not thread.is_alive()
