"""The loop: every message is answered, stops are complete, clients see gauges of zero."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from evensong.engine.core.core import EngineCore
from evensong.engine.core.inbox import Abort, Add, ClientLost, Failure, Inbox, Message, Shutdown, Undecodable, Utility
from evensong.engine.core.loop import CoreFailure, CoreLoop
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, FinishReason
from evensong.protocol.request import EngineCoreRequest, UtilityCall
from evensong.protocol.wire import pack
from evensong.testing.fake_executor import FakeExecutor
from tests.unit.engine.core.making import ask, make_core


class Rig:
    def __init__(self, core: EngineCore) -> None:
        self.core, self.inbox = core, Inbox()
        self.sent: list[tuple[int, EngineCoreOutputs]] = []
        self.loop = CoreLoop(core, self.inbox, lambda client, message: self.sent.append((client, message)))

    def run(self, *messages: Message, seconds: float = 30.0) -> None:
        """Puts the messages, then a shutdown; runs until the loop ends."""
        for message in (*messages, Shutdown(seconds)):
            self.inbox.put(message)
        self.loop.run()

    def admissions(self) -> list[Admission]:
        return [a for _, message in self.sent for a in message.admissions]

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        return [o for _, message in self.sent for o in message.outputs if o.request_id == request_id]


@pytest.fixture
def rig() -> Iterator[Rig]:
    core = make_core()
    yield Rig(core)
    core.shutdown()


def test_requests_run_to_their_end_before_the_loop_stops(rig: Rig) -> None:
    rig.run(Add(0, ask("a")), Add(1, ask("b", client_index=1)))
    assert [a.refusal for a in rig.admissions()] == [None, None]
    for client, name in ((0, "a"), (1, "b")):
        assert sum(len(o.new_token_ids) for o in rig.outputs(name)) == 4
        assert rig.outputs(name)[-1].finish_reason is FinishReason.LENGTH
        assert {c for c, m in rig.sent if any(o.request_id == name for o in m.outputs)} == {client}


def test_what_comes_after_the_shutdown_is_refused_not_left_unanswered(rig: Rig) -> None:
    rig.inbox.put(Shutdown(1.0))
    rig.run(Add(0, ask("late")), Utility(0, UtilityCall(3, 0, "is_scheduler_empty", pack({}))))
    (admission,) = rig.admissions()
    assert admission.refusal is not None and admission.refusal.status == 503
    assert [m.utility.call_id for _, m in rig.sent if m.utility] == [3]


def test_workers_get_idle_time_until_a_message_comes() -> None:
    executor = FakeExecutor()
    rig = Rig(make_core(executor))
    executor.worker.idle_pieces = 10**9
    thread = threading.Thread(target=rig.loop.run)
    thread.start()
    deadline = time.monotonic() + 10
    while executor.worker.idle_pieces == 10**9 and time.monotonic() < deadline:
        time.sleep(0.01)
    rig.inbox.put(Add(0, ask("a")))
    rig.inbox.put(Shutdown(30.0))
    thread.join(timeout=10)
    assert not thread.is_alive() and 0 < executor.worker.idle_pieces < 10**9
    assert rig.outputs("a")[-1].finish_reason is FinishReason.LENGTH
    rig.core.shutdown()


def test_the_kv_cache_is_proved_sound_when_it_is_quiet_not_before_the_next_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    nexts = iter([Add(0, ask("b")), Add(0, ask("c"))])
    prove = rig.core.scheduler.check_kv_cache

    def send(_: int, message: EngineCoreOutputs) -> None:
        for output in message.outputs:
            if output.finish_reason is not None:
                events.append(output.request_id)
                if (following := next(nexts, None)) is not None:
                    rig.inbox.put(following)

    def proved() -> dict[str, int]:
        events.append("proved")
        rig.inbox.put(Shutdown(1.0))
        return prove()

    monkeypatch.setattr(rig.core.scheduler, "check_kv_cache", proved)
    rig.inbox.put(Add(0, ask("a")))
    CoreLoop(rig.core, rig.inbox, send).run()
    assert events == ["a", "b", "c", "proved"]


def test_at_the_deadline_what_runs_is_aborted() -> None:
    core = make_core(FakeExecutor(step_seconds=0.01))
    rig = Rig(core)
    begin = time.monotonic()
    rig.run(Add(0, ask("a", max_tokens=200)), seconds=0.1)
    core.shutdown()
    assert time.monotonic() - begin < 1.0
    assert rig.outputs("a")[-1].finish_reason is FinishReason.ABORT and len(rig.outputs("a")) > 1


def test_a_refusal_a_throwing_admission_and_a_good_one_each_get_their_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rig.core.scheduler.add_request

    def add(request: EngineCoreRequest) -> Admission:
        if request.request_id == "bug":
            raise KeyError("a bug")
        return real(request)

    monkeypatch.setattr(rig.core.scheduler, "add_request", add)
    rig.run(Add(0, ask("bug")), Add(0, ask("long", [1] * 300)), Add(0, ask("good")))
    statuses = {a.request_id: a.refusal and a.refusal.status for a in rig.admissions()}
    assert statuses == {"bug": 500, "long": 400, "good": None}
    assert rig.outputs("good")[-1].finish_reason is FinishReason.LENGTH


def test_what_cannot_be_decoded_is_answered_to_its_sender(rig: Rig) -> None:
    rig.run(Undecodable(1, "why", request_id="r", attempt=2), Undecodable(2, "why", call_id=5), Undecodable(0, "why"))
    (to_one, first), (to_two, second) = rig.sent
    assert (to_one, to_two) == (1, 2)
    assert (first.admissions[0].request_id, first.admissions[0].attempt) == ("r", 2)
    assert second.utility is not None and second.utility.call_id == 5 and "why" in str(second.utility.failure)


def test_idle_clients_see_gauges_of_zero(rig: Rig) -> None:
    thread = threading.Thread(target=rig.loop.run)
    thread.start()
    rig.inbox.put(Add(0, ask("a", max_tokens=100)))
    rig.core.aborts.put(["a"])
    rig.inbox.put(Abort(["a"]))
    until = time.monotonic() + 5
    while not (rig.sent and rig.sent[-1][1].stats is not None and not rig.sent[-1][1].outputs):
        assert time.monotonic() < until
        time.sleep(0.005)
    stats = rig.sent[-1][1].stats
    assert stats is not None and (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    count = len(rig.sent)
    time.sleep(0.05)
    assert len(rig.sent) == count, "once"
    rig.inbox.put(Shutdown(0))
    thread.join(5)
    assert rig.outputs("a")[-1].finish_reason is FinishReason.ABORT


def test_a_lost_clients_requests_end_and_it_is_told_so_while_others_run_on(rig: Rig) -> None:
    rig.run(Add(0, ask("a")), Add(1, ask("b", client_index=1)), ClientLost(1))
    assert [o.finish_reason for o in rig.outputs("b")] == [FinishReason.ABORT]
    assert rig.outputs("a")[-1].finish_reason is FinishReason.LENGTH


def test_a_failure_ends_the_loop(rig: Rig) -> None:
    with pytest.raises(CoreFailure, match="worker 3"):
        rig.run(Failure("worker 3"))


def test_a_pause_is_answered_late_and_a_stop_does_not_spin_on_what_it_holds(rig: Rig) -> None:
    pause = Utility(4, UtilityCall(9, 4, "pause", pack({"mode": "wait"})))
    rig.loop._handle(Add(0, ask("a")))
    rig.core.step()
    rig.run(pause, Add(0, ask("b")), seconds=0.3)
    assert rig.outputs("a")[-1].finish_reason is FinishReason.LENGTH
    (replied,) = [(client, m.utility) for client, m in rig.sent if m.utility]
    assert replied[0] == 4 and replied[1].call_id == 9 and replied[1].failure is None
    assert rig.outputs("b")[-1].finish_reason is FinishReason.ABORT
