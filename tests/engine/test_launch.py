"""The launcher with a scripted core: start-up, failures in each state, the end, what is left behind."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import zmq

from evensong.config.resolve import resolve
from evensong.config.sections import EngineConfig
from evensong.engine.launch import Launch
from evensong.engine.launch_table import Limits
from evensong.protocol.errors import ConfigError, EngineDeadError, EngineStartError
from evensong.utils.child import _environment
from tests.engine.fake_core import RESOURCES
from tests.engine.launching import eventually, open_fake_launch, running

CONFIG = resolve({"model": "demo"})


def start(limits: Limits | None = None, config: EngineConfig = CONFIG) -> Launch:
    launch = open_fake_launch(config, lambda *_: None, **({"limits": limits} if limits else {}))
    launch.start_core()
    return launch


def test_a_core_becomes_ready_and_ends(sockets_base: Path) -> None:
    seen = []
    launch = open_fake_launch(CONFIG, lambda membership, fault: seen.append((membership.members[0].state, fault)))
    folder = next(sockets_base.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    try:
        launch.start_core()
        assert launch.wait_ready() == RESOURCES
        assert launch.membership.members[0].state == "READY"
        pid = launch.pids["evensong:core-0"]
        assert os.getsid(pid) == pid, "the child sits in a session of its own"
        command = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert launch.token not in command and launch.token.hex().encode() not in command
    finally:
        launch.close()
    assert not running(pid)
    assert not folder.exists()
    assert [state for state, _ in seen][:3] == ["NEW", "CONNECTED", "READY"] or seen[-1][0] in ("READY", "DEAD")
    assert launch.fault is None, "a core that was asked to end is no fault"
    launch.close()


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("usage", ConfigError, ["there is no model 'demo'"]),
        ("crash early", EngineStartError, ["evensong:core-0", "NEW", "exit code 3", "a line that explains it"]),
        ("crash while loading", EngineStartError, ["evensong:core-0", "CONNECTED", "SIGSEGV"]),
    ],
)
def test_a_failed_start_says_which_state_and_why(
    monkeypatch: pytest.MonkeyPatch, mode: str, error: type[Exception], words: list[str]
) -> None:
    monkeypatch.setenv("FAKE_CORE", mode)
    launch = start()
    try:
        with pytest.raises(error) as caught:
            launch.wait_ready()
    finally:
        launch.close()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert launch.membership.members[0].state == "DEAD"


@pytest.mark.parametrize(
    ("mode", "limits", "state"),
    [
        ("mute", Limits(connect=0.3, ready=10, exit=1), "NEW"),
        ("stuck while loading", Limits(connect=10, ready=0.3, exit=1), "CONNECTED"),
    ],
)
def test_each_state_has_a_time_limit(monkeypatch: pytest.MonkeyPatch, mode: str, limits: Limits, state: str) -> None:
    monkeypatch.setenv("FAKE_CORE", mode)
    launch = start(limits)
    try:
        with pytest.raises(EngineStartError, match=f"still in state {state} after 0.3 s"):
            launch.wait_ready()
        assert eventually(lambda: not launch.pids), "a core that is late is killed"
    finally:
        launch.close()


def test_a_killed_core_is_noticed_at_once() -> None:
    noticed = threading.Event()
    launch = open_fake_launch(CONFIG, lambda membership, fault: noticed.set() if fault else None)
    try:
        launch.start_core()
        launch.wait_ready()
        begin = time.monotonic()
        os.kill(launch.pids["evensong:core-0"], signal.SIGKILL)
        assert noticed.wait(1.0)
        assert time.monotonic() - begin < 1.0
        assert isinstance(launch.fault, EngineDeadError)
        assert "SIGKILL" in str(launch.membership.members[0].reason)
    finally:
        launch.close()


def test_a_core_that_does_not_listen_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CORE", "deaf")
    launch = start(Limits(connect=10, ready=10, exit=0.5))
    launch.wait_ready()
    pid = launch.pids["evensong:core-0"]
    begin = time.monotonic()
    launch.close()
    assert time.monotonic() - begin < 3.0
    assert not running(pid)


def test_closing_while_the_core_starts_leaves_nothing_and_wakes_the_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CORE", "stuck while loading")
    launch = start()
    errors = []

    def wait() -> None:
        try:
            launch.wait_ready()
        except EngineStartError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert eventually(lambda: launch.membership.members[0].state == "CONNECTED")
    launch.close()
    waiter.join(2)
    assert errors == ["the engine was closed while it started"]


def test_foreign_messages_are_dropped_and_counted(sockets_base: Path) -> None:
    launch = open_fake_launch(CONFIG, lambda *_: None)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"ipc://{next(sockets_base.iterdir())}/handshake")
            stranger.send_multipart([b"x" * 24, b"\xc0"])
            stranger.send(b"one frame")
            stranger.send_multipart([b"", b"", b"", b""])
            assert eventually(lambda: launch.num_dropped == 3)
        launch.start_core()
        assert launch.wait_ready() == RESOURCES
    finally:
        launch.close()


def test_a_module_that_is_not_there_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    launch = start()
    try:
        with pytest.raises(EngineStartError, match=r"NEW \(exit code 1: .*No module named"):
            launch.wait_ready()
    finally:
        launch.close()


def test_an_interpreter_that_is_not_there_fails_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    launch = open_fake_launch(CONFIG, lambda *_: None)
    try:
        with pytest.raises(EngineStartError, match="could not be started"):
            launch.start_core()
    finally:
        launch.close()


def test_no_place_for_sockets_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> None:
        raise OSError("no writable folder")

    monkeypatch.setattr("evensong.engine.launch.LaunchFolder", no_folder)
    with pytest.raises(EngineStartError, match="no folder for the engine's sockets: no writable folder"):
        open_fake_launch(CONFIG, lambda *_: None)


def test_a_callback_that_throws_fails_the_launch_not_the_waiters() -> None:
    def broken(*_: object) -> None:
        raise ValueError("a broken listener")

    launch = open_fake_launch(CONFIG, broken)
    try:
        launch.start_core()
        with pytest.raises(EngineDeadError, match="a broken listener"):
            launch.wait_ready()
    finally:
        launch.close()


def test_private_settings_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSONG_API_KEY", "secret")
    monkeypatch.setenv("EVENSONG_CACHE", "/somewhere")
    environment = _environment()
    assert "EVENSONG_API_KEY" not in environment
    assert environment["EVENSONG_CACHE"] == "/somewhere"
