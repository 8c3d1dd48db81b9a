"""EngineCore: order of a step, aborts, failures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from evensong.engine.core.core import EngineCore
from evensong.protocol.errors import ConfigError
from evensong.protocol.output import FinishReason
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.testing.fake_executor import FakeExecutor
from tests.unit.engine.core.making import AnyToken, ask, make_core


class Watched(FakeExecutor):
    def __init__(self) -> None:
        super().__init__(steps_ahead=0)
        self.calls: list[str] = []
        self.closed = 0

    def execute_model(self, plan: SchedulerOutput) -> Future[None]:
        self.calls.append("execute")
        return super().execute_model(plan)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelOutput]:
        self.calls.append("sample")
        return super().sample_tokens(bitmask)

    def shutdown(self) -> None:
        self.closed += 1
        super().shutdown()


@pytest.fixture
def executor() -> Watched:
    return Watched()


@pytest.fixture
def core(executor: Watched) -> Iterator[EngineCore]:
    made = make_core(executor)
    yield made
    made.shutdown()


def test_an_idle_step_does_nothing(core: EngineCore, executor: Watched) -> None:
    assert core.step() == ({}, False) and executor.calls == []


def test_a_step_executes_makes_the_bitmask_samples_aborts_and_updates(
    core: EngineCore, executor: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is planned ahead: one step after the other."""
    for name in ("get_grammar_bitmask", "update_from_output", "finish_requests"):
        real = getattr(core.scheduler, name)

        def watched(*args: object, name: str = name, real: object = real) -> object:
            executor.calls.append(name)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(core.scheduler, name, watched)
    core.add_request(ask("a"))
    core.add_request(ask("b", client_index=1))
    core.scheduler.requests["b"].grammar = AnyToken()
    core.aborts.put(["a", "unknown"])
    outputs, model_ran = core.step()
    assert executor.calls == ["execute", "get_grammar_bitmask", "sample", "finish_requests", "update_from_output"]
    assert model_ran and core.steps.current_plan is None
    assert [(o.request_id, o.finish_reason, o.new_token_ids) for o in outputs[0]] == [("a", FinishReason.ABORT, [])]
    assert [(o.request_id, len(o.new_token_ids)) for o in outputs[1]] == [("b", 1)]


def test_a_failing_step_raises_and_leaves_its_plan_as_a_note() -> None:
    core = make_core(FakeExecutor(fail_at_step=1))
    core.add_request(ask("a"))
    with pytest.raises(RuntimeError, match="fails at step 1"):
        core.step()
    assert core.steps.current_plan is not None and list(core.steps.current_plan.num_scheduled_tokens) == ["a"]
    core.shutdown()
    core.shutdown()


def test_a_worker_that_fails_between_steps_ends_the_core_too(core: EngineCore, executor: Watched) -> None:
    executor.fail("worker 0 is gone")
    with pytest.raises(RuntimeError, match="worker 0 is gone"):
        core.step()


def test_a_core_that_cannot_start_ends_its_workers(executor: Watched) -> None:
    with pytest.raises(ConfigError, match="own limit of 4096"):
        make_core(executor, max_model_len=5000)
    assert executor.closed == 1
