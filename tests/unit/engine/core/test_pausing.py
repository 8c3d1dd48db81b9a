"""Pause and sleep: what runs ends, finishes or stays; what comes waits; afterwards the same tokens come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from evensong.engine.core.control import Control
from evensong.engine.core.core import EngineCore, Outputs
from evensong.engine.core.pausing import Later
from evensong.protocol.errors import RequestError
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.request import UtilityCall
from evensong.protocol.wire import pack, unpack
from evensong.testing.fake_executor import FakeExecutor, scripted_token
from evensong.utils.progress import CoreState, ProgressPage
from tests.unit.engine.core.making import ask, make_core

PROMPT = list(range(20, 60))


class Rig:
    """A core whose outputs are kept."""

    def __init__(self, **settings: Any) -> None:
        self.executor = FakeExecutor()
        self.core: EngineCore = make_core(self.executor, **settings)
        self.got: list[EngineCoreOutput] = []
        self.control = Control(self.core, self.keep)

    def keep(self, outputs: Outputs) -> None:
        self.got += [output for new in outputs.values() for output in new]

    def call(self, verb: str, **args: Any) -> Any:
        return self.control.call(verb, args)

    def steps(self, count: int = 100) -> int:
        """Takes steps while there is work; how many ran."""
        for done in range(count):
            outputs, ran = self.core.step()
            self.keep(outputs)
            if not ran:
                return done
        return count

    def tokens(self, request_id: str) -> list[int]:
        return [token for o in self.got if o.request_id == request_id for token in o.new_token_ids]

    def ends(self) -> dict[str, FinishReason]:
        return {o.request_id: o.finish_reason for o in self.got if o.finish_reason is not None}


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(scripted_token(tokens))
    return tokens[len(prompt) :]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.core.shutdown()


@pytest.mark.parametrize("clear_cache", [True, False])
def test_keep_stops_requests_where_they_are(rig: Rig, clear_cache: bool) -> None:
    for name in "ab":
        rig.core.add_request(ask(name, [*PROMPT, ord(name)], max_tokens=9))
    rig.steps(3)
    assert rig.call("pause", mode="keep", clear_cache=clear_cache) is None
    before = {name: rig.tokens(name) for name in "ab"}
    assert rig.call("is_paused") and not rig.call("is_sleeping")
    assert rig.core.progress.state is CoreState.PAUSED
    assert rig.core.add_request(ask("c", [7, 8])).refusal is None
    assert rig.steps() == 0 and {name: rig.tokens(name) for name in "ab"} == before
    assert (rig.call("check_kv_cache")["owned"] == 0) is clear_cache
    rig.call("resume")
    assert not rig.call("is_paused") and rig.core.progress.state is CoreState.OPEN
    assert rig.steps() > 5
    for name in "ab":
        assert rig.tokens(name) == expected([*PROMPT, ord(name)], 9)
    assert rig.tokens("c") == expected([7, 8], 4)
    assert set(rig.ends().values()) == {FinishReason.LENGTH}


def test_abort_ends_them_and_new_ones_wait(rig: Rig) -> None:
    for name in "ab":
        rig.core.add_request(ask(name, [*PROMPT, ord(name)], max_tokens=9))
    rig.steps(2)
    assert rig.call("pause") is None
    assert rig.ends() == dict.fromkeys("ab", FinishReason.ABORT)
    rig.core.add_request(ask("c", [7, 8]))
    assert rig.steps() == 0 and rig.tokens("c") == []
    assert rig.call("abort_requests", request_ids=["c"]) is None and rig.ends()["c"] is FinishReason.ABORT
    rig.core.add_request(ask("d", [7, 8]))
    rig.call("resume")
    rig.steps()
    assert rig.tokens("d") == expected([7, 8], 4)


def test_wait_lets_finish_what_has_begun(rig: Rig) -> None:
    rig.core.add_request(ask("a", PROMPT, max_tokens=9))
    rig.steps(2)
    later = rig.call("pause", mode="wait")
    assert isinstance(later, Later) and not later.is_due()
    rig.core.add_request(ask("b", [7, 8]))
    rig.steps()
    assert rig.tokens("a") == expected(PROMPT, 9) and rig.tokens("b") == [] and rig.ends()["a"] is FinishReason.LENGTH
    assert later.is_due() and later.finish() is None
    assert rig.call("is_paused") and rig.steps() == 0
    rig.call("resume")
    rig.steps()
    assert rig.tokens("b") == expected([7, 8], 4)


def test_wait_also_lets_finish_what_lost_its_slot() -> None:
    rig = Rig(num_kv_blocks_override=4, max_model_len=64)
    for name in "ab":
        rig.core.add_request(ask(name, [ord(name), *PROMPT[:20]], max_tokens=30))
    assert rig.steps(1)
    while not rig.core.scheduler.waiting:
        assert rig.steps(1)
    later = rig.call("pause", mode="wait")
    rig.steps(200)
    assert later.is_due()
    for name in "ab":
        assert rig.tokens(name) == expected([ord(name), *PROMPT[:20]], 30)
    rig.core.shutdown()


@pytest.mark.parametrize(("verb", "args"), [("resume", {}), ("pause", {"mode": "keep"})])
def test_a_pause_that_another_call_overtakes_says_so(rig: Rig, verb: str, args: dict[str, str]) -> None:
    rig.core.add_request(ask("a", PROMPT, max_tokens=9))
    rig.steps(2)
    reply = rig.control.answer(UtilityCall(5, 3, "pause", pack({"mode": "wait"})))
    assert reply is None and rig.control.late_replies() == []
    rig.call(verb, **args)
    ((client_index, late),) = rig.control.late_replies()
    assert client_index == 3 and late.call_id == 5 and late.refusal is not None and late.refusal.status == 409
    rig.call("resume")
    assert rig.control.late_replies() == [] and rig.steps() > 5


def test_a_late_answer_comes_with_the_last_step(rig: Rig) -> None:
    rig.core.add_request(ask("a", PROMPT, max_tokens=3))
    rig.steps(1)
    assert rig.control.answer(UtilityCall(5, 0, "sleep", pack({"mode": "wait"}))) is None
    rig.steps()
    ((_, late),) = rig.control.late_replies()
    assert late.refusal is None and late.failure is None and unpack(late.result) is None
    assert rig.call("is_sleeping") and rig.executor.worker.asleep == {"kv_cache"}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_sleep_forgets_and_wake_up_goes_on(rig: Rig, level: int, mode: str) -> None:
    rig.core.add_request(ask("a", PROMPT, max_tokens=9))
    rig.steps(4)
    assert rig.call("sleep", level=level, mode=mode) is None
    assert rig.call("is_sleeping") is (level > 0) and rig.call("is_paused")
    assert rig.core.progress.state is (CoreState.ASLEEP if level else CoreState.PAUSED)
    rig.core.add_request(ask("b", PROMPT))
    assert rig.steps() == 0
    if level:
        for verb in ("resume", "collective_rpc"):
            with pytest.raises(RequestError, match="sleeps") as refused:
                rig.call(verb, **({"method": "describe"} if verb == "collective_rpc" else {}))
            assert refused.value.status == 409
        assert rig.call("pause", mode="keep") is None and rig.steps() == 0
    rig.call("wake_up")
    assert not rig.call("is_sleeping") and not rig.call("is_paused") and not rig.executor.worker.asleep
    rig.steps()
    assert rig.tokens("b") == expected(PROMPT, 4)
    assert rig.tokens("a") == expected(PROMPT, 9)[: 9 if mode == "keep" else len(rig.tokens("a"))]
    assert rig.ends()["a"] is (FinishReason.LENGTH if mode == "keep" else FinishReason.ABORT)


def test_waking_up_in_parts(rig: Rig) -> None:
    rig.call("sleep", level=2)
    rig.call("wake_up", tags=["weights"])
    assert rig.call("is_sleeping") and rig.executor.worker.asleep == {"kv_cache"}
    rig.call("sleep", level=1)
    rig.call("wake_up", tags=["kv_cache"])
    assert not rig.call("is_sleeping") and not rig.call("is_paused")
    rig.call("wake_up")
    with pytest.raises(RequestError, match="tags"):
        rig.call("wake_up", tags=["lora"])


def test_a_worker_that_cannot_wake_up_stays_asleep(rig: Rig) -> None:
    rig.call("sleep", level=2)

    def broken(part: str) -> None:
        raise OSError("the file is gone")

    rig.executor.worker.wake_up, whole = broken, rig.executor.worker.wake_up  # type: ignore[method-assign]
    reply = rig.control.answer(UtilityCall(1, 0, "wake_up", pack({})))
    assert reply is not None and "the file is gone" in (reply.failure or "")
    assert rig.call("is_sleeping")
    rig.executor.worker.wake_up = whole  # type: ignore[method-assign]
    rig.call("wake_up")
    assert not rig.call("is_sleeping")


def test_a_step_tells_how_much_it_holds() -> None:
    rig, seen = Rig(), []

    class Watched(ProgressPage):
        def tick(self) -> None:
            seen.append((rig.core.progress.num_tokens, rig.core.progress.num_steps))

    rig.executor.watch_progress(Watched())
    rig.core.add_request(ask("a", PROMPT, max_tokens=2))
    rig.steps()
    # The second one was planned, and ran, before the first one's result was applied.
    assert seen == [(40, 0), (40, 0)] and (rig.core.progress.num_tokens, rig.core.progress.num_steps) == (0, 2)
    rig.core.shutdown()


def test_caches_are_reset_under_running_requests(rig: Rig) -> None:
    rig.core.add_request(ask("a", PROMPT, max_tokens=9))
    rig.steps(4)
    assert rig.call("reset_prefix_cache") is False
    assert rig.call("reset_prefix_cache", reset_running_requests=True) is True
    rig.steps()
    assert rig.tokens("a") == expected(PROMPT, 9)


@pytest.mark.parametrize(
    ("verb", "args", "field"),
    [
        ("pause", {"mode": "stop"}, "mode"),
        ("pause", {"clear_cache": 1}, "clear_cache"),
        ("sleep", {"level": 3}, "level"),
        ("abort_requests", {}, "request_ids"),
        ("abort_requests", {"request_ids": "a"}, "request_ids"),
        ("collective_rpc", {"method": "shutdown"}, "method"),
        ("collective_rpc", {"method": "describe", "args": [1]}, "args"),
        ("collective_rpc", {"method": "_execute"}, "method"),
    ],
)
def test_arguments_are_checked_against_the_table(rig: Rig, verb: str, args: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        rig.call(verb, **args)
    assert refused.value.param == field
    assert not rig.call("is_paused")
