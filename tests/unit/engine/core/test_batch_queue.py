"""Steps in flight: the order of verbs, what happens between forward and update, failures, draining."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from evensong.engine.core.core import EngineCore, Outputs
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.testing.fake_executor import FakeExecutor, scripted_token
from tests.unit.engine.core.making import AnyToken, ask, make_core


class Noting(FakeExecutor):
    """Notes each verb with its step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: list[str] = []
        self.plans: list[SchedulerOutput] = []

    def execute_model(self, plan: SchedulerOutput) -> Future[None]:
        self.calls.append(f"execute {plan.step_id}")
        self.plans.append(plan)
        return super().execute_model(plan)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelOutput]:
        self.calls.append(f"sample {self.plans[-1].step_id}")
        return super().sample_tokens(bitmask)


class Rig:
    """A core and what it answered; `updates` are noted among the executor's calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: int = 1, ahead: int = 1, **settings: Any) -> None:
        self.executor = Noting(num_stages=stages, steps_ahead=ahead, **settings)
        self.core: EngineCore = make_core(self.executor, pipeline_parallel_size=stages)
        self.got: list[EngineCoreOutput] = []
        update: Callable[..., Outputs] = self.core.scheduler.update_from_output

        def noted(plan: SchedulerOutput, output: ModelOutput) -> Outputs:
            self.executor.calls.append(f"update {plan.step_id}")
            return update(plan, output)

        monkeypatch.setattr(self.core.scheduler, "update_from_output", noted)

    def step(self) -> None:
        self.keep(self.core.step()[0])

    def run(self) -> None:
        while self.core.has_work():
            self.step()

    def keep(self, outputs: Outputs) -> None:
        self.got += [output for new in outputs.values() for output in new]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.got if output.request_id == request_id for token in output.new_token_ids]

    def take_calls(self) -> list[str]:
        calls = list(self.executor.calls)
        self.executor.calls.clear()
        return calls


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(scripted_token(tokens))
    return tokens[len(prompt) :]


def test_the_next_step_is_handed_in_before_a_result_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.core.add_request(ask("a", [5, 6], max_tokens=4))
    rig.step()
    assert rig.take_calls() == ["execute 1", "sample 1", "execute 2", "sample 2", "update 1"]
    rig.step()
    assert rig.take_calls() == ["execute 3", "sample 3", "update 2"]
    rig.run()
    # The fourth token is the last whatever it is: nothing is planned behind it.
    assert rig.take_calls() == ["execute 4", "sample 4", "update 3", "update 4"]
    assert rig.tokens("a") == alone([5, 6], 4)
    rig.core.shutdown()


def test_without_planning_ahead_a_result_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, ahead=0)
    rig.core.add_request(ask("a", [5, 6], max_tokens=2))
    rig.run()
    assert rig.take_calls() == ["execute 1", "sample 1", "update 1", "execute 2", "sample 2", "update 2"]
    rig.core.shutdown()


@pytest.mark.parametrize(("stages", "ahead"), [(2, 0), (2, 1), (3, 1)])
def test_stages_are_kept_busy(monkeypatch: pytest.MonkeyPatch, stages: int, ahead: int) -> None:
    """With enough requests every step in flight has its share of those that decode."""
    rig = Rig(monkeypatch, stages, ahead)
    for number in range(12):
        rig.core.add_request(ask(str(number), [number, 7], max_tokens=30))
    for _ in range(12):
        rig.step()
    shares = [len(plan.num_scheduled_tokens) for plan in rig.executor.plans[-6:]]
    assert set(shares) == {12 // stages}
    assert len(rig.core.steps) == stages + ahead - 1
    rig.run()
    for number in range(12):
        assert rig.tokens(str(number)) == alone([number, 7], 30)
    rig.core.shutdown()


def test_masks_wait_for_the_tokens_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constrained row's forward pass is handed in early, its draw after the result before."""
    rig = Rig(monkeypatch)
    rig.core.add_request(ask("a", [5, 6], max_tokens=3))
    rig.core.scheduler.requests["a"].grammar = AnyToken()
    rig.step()
    assert rig.take_calls() == ["execute 1", "sample 1", "execute 2", "update 1", "sample 2"]
    rig.step()
    assert rig.take_calls() == ["execute 3", "update 2", "sample 3"]
    rig.run()
    assert [plan.awaits_bitmask for plan in rig.executor.plans] == [True] * 3
    assert rig.tokens("a") == alone([5, 6], 3)
    rig.core.shutdown()


def test_a_constrained_request_that_ends_meanwhile_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    stop = alone([5, 6], 1)
    request = ask("a", [5, 6], max_tokens=9)
    request.params.stop_token_ids = stop
    rig.core.add_request(request)
    rig.core.scheduler.requests["a"].grammar = AnyToken()
    rig.run()
    assert rig.take_calls() == ["execute 1", "sample 1", "execute 2", "update 1", "sample 2", "update 2"]
    assert rig.tokens("a") == stop and rig.got[-1].finish_reason is FinishReason.STOP
    assert rig.core.scheduler.check_kv_cache()["owned"] == 0
    rig.core.shutdown()


def test_a_step_behind_a_stop_is_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks go to a newcomer while the step that still writes them is in flight."""
    rig = Rig(monkeypatch)
    request = ask("a", [5, 6], max_tokens=9)
    request.params.stop_token_ids = alone([5, 6], 1)
    rig.core.add_request(request)
    rig.step()
    assert rig.got[-1].finish_reason is FinishReason.STOP and len(rig.core.steps) == 1
    rig.core.add_request(ask("a", [5, 6], max_tokens=3))
    rig.got.clear()
    rig.run()
    assert rig.tokens("a") == alone([5, 6], 3)
    assert rig.executor.plans[2].released_request_ids == ["a"]
    rig.core.shutdown()


def test_aborts_between_forward_and_update_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for name in "ab":
        rig.core.add_request(ask(name, [ord(name), 6], max_tokens=5))
    rig.step()
    rig.core.aborts.put(["a"])
    rig.step()
    assert [o.finish_reason for o in rig.got if o.request_id == "a"] == [None, FinishReason.ABORT]
    rig.run()
    assert rig.tokens("a") == alone([ord("a"), 6], 1) and rig.tokens("b") == alone([ord("b"), 6], 5)
    assert rig.core.scheduler.check_kv_cache()["owned"] == 0
    rig.core.shutdown()


def test_when_all_is_aborted_what_is_in_flight_is_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.core.add_request(ask("a", [5, 6], max_tokens=9))
    rig.step()
    rig.core.finish_requests(["a"], FinishReason.ABORT)
    assert not rig.core.scheduler.has_requests() and rig.core.has_work()
    rig.run()
    assert len(rig.core.steps) == 0 and rig.take_calls()[-1] == "update 2"
    rig.core.shutdown()


def test_draining_plans_nothing_and_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, stages=2)
    for number in range(4):
        rig.core.add_request(ask(str(number), [number, 6], max_tokens=9))
    for _ in range(5):
        rig.step()
    assert len(rig.core.steps) == 2
    rig.take_calls()
    rig.keep(rig.core.drain())
    assert [call.split()[0] for call in rig.take_calls()] == ["update"] * 2
    assert all(request.num_unknown_tokens == 0 for request in rig.core.scheduler.running)
    rig.core.scheduler.preempt_all()
    assert rig.core.scheduler.reset_prefix_cache()
    rig.run()
    for number in range(4):
        assert rig.tokens(str(number)) == alone([number, 6], 9)
    rig.core.shutdown()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_failing_step_raises_and_leaves_its_plan_as_a_note(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    rig = Rig(monkeypatch, fail_at_step=step)
    rig.core.add_request(ask("a", [5, 6], max_tokens=9))
    with pytest.raises(RuntimeError, match=f"fails at step {step}"):
        rig.run()
    assert rig.core.steps.current_plan is not None and rig.core.steps.current_plan.step_id == step
    assert len(rig.tokens("a")) == step - 1
    with pytest.raises(RuntimeError):
        rig.step()
    rig.core.shutdown()


def test_nobody_is_preempted_for_a_token_that_may_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both want the last block for their next tokens; one ends with the token that is on its way."""
    executor = Noting()
    core = make_core(executor, num_kv_blocks_override=3, block_size=4, max_model_len=12)
    got: list[EngineCoreOutput] = []
    for name in "ab":
        request = ask(name, [ord(name), 6, 7], max_tokens=6)
        request.params.stop_token_ids = alone([ord("a"), 6, 7], 2)[1:]
        core.add_request(request)
    while core.has_work():
        got += [one for new in core.step()[0].values() for one in new]
    assert core.scheduler.make_stats().num_preemptions == 0
    assert [o.finish_reason for o in got if o.request_id == "a"][-1] is FinishReason.STOP
    assert [t for o in got if o.request_id == "b" for t in o.new_token_ids] == alone([ord("b"), 6, 7], 6)
    core.shutdown()
