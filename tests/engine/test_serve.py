"""The launcher process with scripted children: signals, exit codes, faults, what is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.launching import eventually, running

ROOT = Path(__file__).resolve().parents[2]


class Serving:
    """A `serve` in a process of its own, its output, its children."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.serve_fakes", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.output += line.decode()

    def ready(self) -> str:
        """Its URL, once it is ready."""
        assert eventually(lambda: "curl:" in self.output or self.process.poll() is not None, 15), self.output
        match = re.search(r"evensong serves .* at (http://[\d.:]+)/v1", self.output)
        assert match, self.output
        return match[1]

    def children(self) -> dict[str, int]:
        """Its children by role."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            role = next((r for r in ("fake_core", "fake_http") if any(r in part for part in child.cmdline())), None)
            if role:
                found[role.removeprefix("fake_")] = child.pid
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 15) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)


def get(url: str, timeout: float = 5.0) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def serving() -> Iterator[list[Serving]]:
    """Put what you start here; it ends with the test."""
    started: list[Serving] = []
    yield started
    for one in started:
        one.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_exits_with_0(serving: list[Serving], number: int) -> None:
    serving.append(one := Serving("0"))
    url = one.ready()
    assert get(url + "/health")[0] == 200
    children = one.children()
    assert set(children) == {"core", "http"}
    title = Path(f"/proc/{one.process.pid}/cmdline").read_bytes().rstrip(b"\0")
    assert title == b"evensong:launcher"
    slow: list[tuple[int, str]] = []
    caller = threading.Thread(target=lambda: slow.append(get(url + "/slow", 20)))
    caller.start()
    time.sleep(0.2)
    one.signal(number)
    assert eventually(lambda: get(url + "/health")[0] == 503, 2), "new requests are refused while it drains"
    assert one.wait() == 0, one.output
    caller.join(5)
    assert slow and slow[0][0] == 200, "the running request finished"
    assert not any(running(pid) for pid in children.values())
    assert "Traceback" not in one.output


def test_a_drain_ends_after_the_time_given(serving: list[Serving]) -> None:
    serving.append(one := Serving("0", "0.5", FAKE_SLOW="20"))
    url = one.ready()
    caller = threading.Thread(target=lambda: pytest.raises(OSError, get, url + "/slow", 20))
    caller.start()
    time.sleep(0.2)
    begin = time.monotonic()
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    assert time.monotonic() - begin < 4.0
    caller.join(5)


def test_a_second_signal_forces_the_end(serving: list[Serving]) -> None:
    serving.append(one := Serving("0", "30", FAKE_SLOW="20"))
    url = one.ready()
    children = one.children()
    caller = threading.Thread(target=lambda: pytest.raises(OSError, get, url + "/slow", 20))
    caller.start()
    time.sleep(0.2)
    one.signal(signal.SIGINT)
    time.sleep(0.3)
    assert one.process.poll() is None
    begin = time.monotonic()
    one.signal(signal.SIGINT)
    assert one.wait() == 130, one.output
    assert time.monotonic() - begin < 2.0
    assert not any(running(pid) for pid in children.values())
    assert "Traceback" not in one.output
    caller.join(5)


def test_a_dead_core_is_told_for_3_seconds_and_ends_with_1(serving: list[Serving]) -> None:
    serving.append(one := Serving("0"))
    url = one.ready()
    children = one.children()
    begin = time.monotonic()
    os.kill(children["core"], signal.SIGKILL)
    assert eventually(lambda: get(url + "/health")[0] == 503, 1.0)
    status, body = get(url + "/health")
    assert "DEAD" in body and "SIGKILL" in body
    time.sleep(1.5)
    assert get(url + "/health")[0] == 503
    assert one.wait() == 1
    assert 2.5 < time.monotonic() - begin < 8
    assert "evensong serve: evensong:core-0 died in state READY (killed by SIGKILL)" in one.output
    assert not any(running(pid) for pid in children.values())


def test_a_dead_http_process_ends_the_rest_with_1(serving: list[Serving]) -> None:
    serving.append(one := Serving("0"))
    one.ready()
    children = one.children()
    os.kill(children["http"], signal.SIGKILL)
    assert one.wait() == 1
    assert "evensong:http-0" in one.output
    assert not any(running(pid) for pid in children.values())


@pytest.mark.parametrize("early", [True, False])
def test_kill_9_of_the_launcher_leaves_no_process_after_5_seconds(serving: list[Serving], early: bool) -> None:
    serving.append(one := Serving("0", **({"FAKE_CORE": "stuck while loading"} if early else {})))
    if early:
        assert eventually(lambda: "core" in one.children())
    else:
        one.ready()
    children = one.children()
    os.kill(one.process.pid, signal.SIGKILL)
    assert eventually(lambda: not any(running(pid) for pid in children.values()), 5.0)
    one.wait()
    # What it left is swept by the next launch, which also shows that the port is free again.
    serving.append(following := Serving("0"))
    following.ready()
    following.signal(signal.SIGTERM)
    assert following.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_start_up_leaves_nothing(serving: list[Serving], sockets_base: Path, number: int) -> None:
    serving.append(one := Serving("0", FAKE_CORE="stuck while loading"))
    assert eventually(lambda: "core" in one.children())
    children = one.children()
    one.signal(number)
    assert one.wait() == 0, one.output
    assert not any(running(pid) for pid in children.values())
    assert not any(sockets_base.iterdir())
    assert "Traceback" not in one.output


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("usage", 2, "evensong serve: there is no model"),
        ("crash early", 1, "evensong serve: evensong:core-0 died in state NEW (exit code 3: a line that explains it)"),
        ("crash while loading", 1, "SIGSEGV"),
    ],
)
def test_a_failed_start_is_one_line_and_an_exit_code(serving: list[Serving], mode: str, code: int, words: str) -> None:
    serving.append(one := Serving("0", FAKE_CORE=mode))
    assert one.wait() == code, one.output
    assert words in one.output
    assert "Traceback" not in one.output


def test_a_busy_port_is_one_line(serving: list[Serving]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        serving.append(one := Serving(str(port)))
        assert one.wait() == 1
    assert one.output.strip() == (
        f"evensong serve: port {port} on 127.0.0.1 is in use; choose another with --port (0 takes a free one)"
    )


def test_a_model_that_is_not_there_is_one_line_and_usage(serving: list[Serving]) -> None:
    serving.append(one := Serving("0", "30", "/no/such/model"))
    assert one.wait() == 2
    assert "evensong serve: no model '/no/such/model'" in one.output
    assert "Traceback" not in one.output


def test_the_port_answers_before_the_core_is_ready_and_the_key_reaches_http_alone(serving: list[Serving]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    begin = time.monotonic()
    serving.append(one := Serving(str(port), FAKE_CORE="stuck while loading", EVENSONG_API_KEY="secret"))

    def answered() -> bool:
        try:
            return "phase='loading the model' key=secret" in get(f"http://127.0.0.1:{port}/health")[1]
        except OSError:
            return False

    assert eventually(answered)
    assert time.monotonic() - begin < 3.0
    for pid in one.children().values():
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
