"""The launch's bookkeeping, without processes: states, verdicts, time limits."""

from __future__ import annotations

import threading
import time

import pytest

from evensong.engine.launch_board import CONNECTED, DEAD, NEW, READY, Board
from evensong.engine.launch_table import CORE, HTTP, Limits
from evensong.protocol.errors import ConfigError, EngineDeadError, EngineStartError
from evensong.protocol.handshake import Failed
from evensong.protocol.kv_spec import Resources

RESOURCES = Resources(8, 16, 128, 4, 64, 100, 1024, "fake", {})
KEY = (CORE, 0)
WEB = (HTTP, 0)


@pytest.fixture
def board() -> Board:
    made = Board(Limits(connect=5.0, ready=50.0, exit=1.0))
    made.add(CORE, 0, "core-0")
    made.add(HTTP, 0, "http-0")
    return made


def test_a_core_goes_through_its_states_once(board: Board) -> None:
    assert board.membership().members[0].state == NEW
    assert not board.ready(KEY, RESOURCES), "READY before HELLO is out of order"
    assert board.hello(KEY, b"id")
    assert not board.hello(KEY, b"thief"), "a second HELLO cannot take its place"
    assert board.find(b"id", 1) == KEY
    assert board.find(b"thief", 1) is None
    assert board.find(b"id", 2) is None, "another incarnation is another process"
    assert board.membership().members[0].state == CONNECTED
    assert board.ready(KEY, RESOURCES)
    assert not board.ready(KEY, RESOURCES)
    member = board.membership().members[0]
    assert (member.state, member.resources) == (READY, RESOURCES)
    assert board.wait_ready() == [RESOURCES]


def test_unknown_processes_change_nothing(board: Board) -> None:
    before = board.membership()
    assert not board.hello(("core", 7), b"id")
    assert not board.ready(("core", 7), RESOURCES)
    board.failed(("core", 7), Failed("x"))
    board.exited(("core", 7), "exit code 1")
    assert board.membership() == before
    assert board.fault is None


@pytest.mark.parametrize(
    ("steps", "error", "state"),
    [(0, EngineStartError, NEW), (1, EngineStartError, CONNECTED), (2, EngineDeadError, READY)],
)
def test_an_end_is_judged_by_the_state_it_came_in(board: Board, steps: int, error: type, state: str) -> None:
    if steps > 0:
        board.hello(KEY, b"id")
    if steps > 1:
        board.ready(KEY, RESOURCES)
    board.exited(KEY, "killed by SIGKILL")
    assert type(board.fault) is error
    assert str(board.fault) == f"core-0 died in state {state} (killed by SIGKILL)"
    member = board.membership().members[0]
    assert (member.state, member.reason) == (DEAD, str(board.fault))


def test_what_a_child_says_counts_more_than_how_it_ended(board: Board) -> None:
    board.hello(KEY, b"id")
    board.failed(KEY, Failed("no such model", usage=True))
    board.exited(KEY, "exit code 2")
    assert isinstance(board.fault, ConfigError)
    assert str(board.fault) == "no such model"
    with pytest.raises(ConfigError):
        board.wait_ready()


def test_the_first_fault_stays(board: Board) -> None:
    board.exited(WEB, "exit code 1")
    board.exited(KEY, "exit code 1")
    board.broken("later")
    assert "http-0" in str(board.fault)


def test_an_end_that_was_asked_for_is_no_fault(board: Board) -> None:
    board.hello(WEB, b"web")
    board.hello(KEY, b"id")
    board.ready(KEY, RESOURCES)
    board.change(draining=True)
    assert board.membership().draining
    board.exited(WEB, "exit code 0")
    assert board.fault is None
    board.exited(KEY, "exit code 1")
    assert isinstance(board.fault, EngineDeadError), "a core must outlive the drain"


def test_closing_expects_every_end_and_wakes_who_waits(board: Board) -> None:
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(EngineStartError) as caught:
            board.wait_ready()
        errors.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    board.change(closing=True)
    waiter.join(2)
    assert errors == ["the engine was closed while it started"]
    board.exited(KEY, "exit code 0")
    assert board.fault is None
    assert board.next_deadline() is None


def test_time_limits_follow_the_state(board: Board) -> None:
    now = time.monotonic()
    first = board.next_deadline()
    assert first is not None and 4.0 < first - now <= 5.1
    assert board.expire(now) == []
    board.hello(WEB, b"web")
    board.hello(KEY, b"id")
    second = board.next_deadline()
    assert second is not None and 49.0 < second - now <= 50.1, "an HTTP process is up when it has said HELLO"
    assert board.expire(now + 6) == []
    assert board.expire(now + 60) == [KEY]
    assert board.expire(now + 60) == [], "once"
    assert str(board.fault) == "core-0 was still in state CONNECTED after 50 s"


def test_only_the_living_are_found(board: Board) -> None:
    assert board.states(HTTP) == {WEB: NEW}
    board.hello(WEB, b"web")
    assert board.states(HTTP) == {WEB: CONNECTED}
    assert board.find(b"web", 1) == WEB
    board.ready(WEB, RESOURCES)
    assert board.states(HTTP) == {WEB: READY}
    board.exited(WEB, "exit code 1")
    assert board.states(HTTP) == {WEB: DEAD}
    assert board.find(b"web", 1) is None
    assert isinstance(board.fault, EngineDeadError)


def test_an_http_process_that_is_ready_says_nothing_of_the_core(board: Board) -> None:
    board.hello(WEB, b"web")
    board.ready(WEB, RESOURCES)
    assert board.membership().members[0].resources is None


def test_phases_are_published(board: Board) -> None:
    board.change(phase="loading the model")
    assert board.membership().phase == "loading the model"
    board.change(draining=True)
    assert board.membership().phase == "loading the model"
    board.change(phase="")
    assert board.membership().phase == ""
