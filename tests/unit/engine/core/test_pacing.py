"""Pacing: the plan behind a running step waits for who comes meanwhile, and never for long enough to be late."""

from __future__ import annotations

import time

import pytest

from evensong.engine.core.gate import Standing
from evensong.engine.core.inbox import Add, Inbox
from evensong.engine.core.loop import CoreLoop
from evensong.engine.core.pacing import ENOUGH_STEPS, MARGIN_SECONDS, MARGIN_SHARE, Pacing
from evensong.testing.fake_executor import FakeExecutor
from tests.unit.engine.core.making import ask, make_core


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def learned(clock: Clock, seconds: float = 0.1, num_tokens: int = 8) -> Pacing:
    """A pacing that has seen enough steps of so many tokens."""
    pacing = Pacing(clock)
    for _ in range(ENOUGH_STEPS):
        pacing.begins(num_tokens)
        clock.now += seconds
        pacing.ends()
        pacing.planned(0.001)
    return pacing


def test_it_waits_until_shortly_before_the_step_ends(clock: Clock) -> None:
    pacing = learned(clock)
    assert pacing.seconds_left() == 0.0, "nothing runs"
    pacing.begins(9)
    left = 0.1 - max(MARGIN_SHARE * 0.1, MARGIN_SECONDS) - 0.001
    assert pacing.seconds_left() == pytest.approx(left)
    clock.now += 0.05
    assert pacing.seconds_left() == pytest.approx(left - 0.05)
    clock.now += 0.05
    assert pacing.seconds_left() == 0.0


def test_it_believes_the_shortest_step_and_the_longest_planning(clock: Clock) -> None:
    pacing = learned(clock)
    pacing.begins(8)
    clock.now += 0.04
    pacing.ends()
    pacing.planned(0.007)
    pacing.begins(8)
    assert pacing.seconds_left() == pytest.approx(0.04 * (1 - MARGIN_SHARE) - 0.007)


@pytest.mark.parametrize("num_tokens", [1, 64, 500])
def test_it_does_not_wait_for_a_step_of_a_kind_that_it_does_not_know(clock: Clock, num_tokens: int) -> None:
    pacing = learned(clock)
    pacing.begins(num_tokens)
    assert pacing.seconds_left() == 0.0


def test_short_steps_are_not_waited_for(clock: Clock) -> None:
    pacing = learned(clock, seconds=MARGIN_SECONDS)
    pacing.begins(8)
    assert pacing.seconds_left() == 0.0


def test_once_it_was_late_it_learns_anew(clock: Clock) -> None:
    """A step that ended while it waited took less than can be known: such times would keep it late for ever."""
    pacing = learned(clock)
    pacing.begins(8)
    clock.now += 0.05
    pacing.late()
    pacing.ends()
    pacing.begins(8)
    assert pacing.seconds_left() == 0.0
    for _ in range(ENOUGH_STEPS):
        clock.now += 0.02
        pacing.ends()
        pacing.begins(8)
    assert 0.0 < pacing.seconds_left() < 0.02


def test_who_comes_while_a_step_runs_is_in_the_next_one(clock: Clock) -> None:
    core = make_core()
    inbox = Inbox()
    loop = CoreLoop(core, inbox, lambda client, message: None)
    assert isinstance(core.steps.pacing, Pacing)
    core.steps.pacing = learned(clock, seconds=0.05, num_tokens=2)
    core.add_request(ask("a", [1, 2], max_tokens=9))
    # A step runs, and nothing is planned behind it yet.
    assert core.step() == ({}, False) and core.step() == ({}, False) and len(core.steps) == 1
    inbox.put(Add(0, ask("b", [3, 4], max_tokens=2)))
    began = time.monotonic()
    loop._drain()
    assert time.monotonic() - began >= 0.03, "the loop listens as long as it may"
    clock.now += 0.05
    outputs, ran = core.step()
    assert ran and [output.request_id for output in outputs[0]] == ["a"] and len(core.steps) == 1
    clock.now += 0.05
    outputs, ran = core.step()
    assert ran and sum(len(new) for new in outputs.values()) == 2, "both are in the second step"
    core.shutdown()


def test_a_closed_gate_does_not_keep_a_result_back(clock: Clock) -> None:
    core = make_core()
    core.steps.pacing = learned(clock, num_tokens=2)
    core.add_request(ask("a", [1, 2], max_tokens=9))
    assert core.step() == ({}, False)
    core.gate.close(Standing.SHUT)
    assert core.step()[1] and not core.has_work()
    core.shutdown()


@pytest.mark.parametrize("settings", [{"steps_ahead": 0}, {"num_stages": 2, "steps_ahead": 0}, {"num_stages": 2}])
def test_only_one_step_ahead_of_one_stage_is_paced(settings: dict[str, int]) -> None:
    executor = FakeExecutor(**settings)
    core = make_core(executor, pipeline_parallel_size=executor.pipeline.num_stages)
    CoreLoop(core, Inbox(), lambda client, message: None)
    assert isinstance(core.steps.pacing, Pacing) is (executor.pipeline.size == 2 and executor.pipeline.num_stages == 1)
    core.shutdown()
