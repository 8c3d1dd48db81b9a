"""Faults and ends of a whole server, seen by its HTTP clients: the real launcher, HTTP process and core loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.launching import eventually, running

ROOT = Path(__file__).resolve().parents[2]
TITLES = ("evensong:launcher", "evensong:http-0", "evensong:core-0")


class Server:
    """A server in processes of its own, that can be hurt."""

    def __init__(self, model: Path, folder: Path, timeout: float = 30.0, step_seconds: float = 0.02) -> None:
        settings = {"SCRIPTED_CORE": json.dumps({"step_seconds": step_seconds}), "XDG_RUNTIME_DIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_scripted", "0", str(timeout), str(model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert eventually(lambda: "curl:" in self.output or self.process.poll() is not None, 30), self.output
        self.url = self.output.split(" at ")[1].split("/v1")[0]
        self.pids = {title: pid for title in TITLES if (pid := self._pid(title))}
        assert set(self.pids) == set(TITLES)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.output += line

    def _pid(self, title: str) -> int | None:
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children()]
        return next((p.pid for p in family if " ".join(p.cmdline()).strip() == title), None)

    def wait(self, timeout: float = 15) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def gone(self) -> bool:
        return not any(running(pid) for pid in self.pids.values())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the servers of a test keep their sockets."""
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def serve(demo_model: Path, folder: Path) -> Iterator[Any]:
    """Starts servers that end with the test."""
    started: list[Server] = []

    def start(**settings: float) -> Server:
        started.append(Server(demo_model, folder, **settings))
        return started[-1]

    yield start
    for server in started:
        server.end()


def body(max_tokens: int, stream: bool = True) -> dict[str, Any]:
    return {
        "model": "scripted",
        "prompt": [11, 12, 13],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        "seed": 1,
    }


class Stream(threading.Thread):
    """Reads one streamed completion to its end, whatever that is."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.done = False
        self.broken: str | None = None
        self.ended = 0.0
        self._url, self._max_tokens = server.url, max_tokens
        self.start()
        assert eventually(lambda: len(self.events) > 3 or self.done, 10)

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body(self._max_tokens), timeout=60) as answer:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.broken = repr(error)
        self.ended = time.monotonic()

    @property
    def token_ids(self) -> list[int]:
        choices = [event["choices"][0] for event in self.events if event.get("choices")]
        return [token for choice in choices for token in choice.get("token_ids") or []]

    @property
    def finish_reason(self) -> str | None:
        reasons = [e["choices"][0].get("finish_reason") for e in self.events if e.get("choices")]
        return next((reason for reason in reasons if reason), None)


def test_kill_9_of_the_core(serve: Any, folder: Path) -> None:
    server = serve()
    streams = [Stream(server, 3000) for _ in range(3)]
    pending: list[httpx.Response] = []
    call = threading.Thread(
        target=lambda: pending.append(httpx.post(f"{server.url}/v1/completions", json=body(3000, False), timeout=30))
    )
    call.start()
    time.sleep(0.3)
    begin = time.monotonic()
    os.kill(server.pids["evensong:core-0"], signal.SIGKILL)
    for stream in streams:
        stream.join(3)
        assert stream.ended - begin < 1.0
        assert "error" in stream.events[-1], "the stream ends with an error event"
        assert stream.done, "and then as every stream does"
    call.join(3)
    assert pending[0].status_code == 500
    assert pending[0].json()["error"]["message"]
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert "SIGKILL" in health.text
    assert httpx.post(f"{server.url}/v1/completions", json=body(1, False)).status_code >= 500
    assert server.wait() == 1
    assert 2.5 < time.monotonic() - begin < 9.0
    assert server.gone()
    assert not any(folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_finishes_what_runs(serve: Any, folder: Path, number: int) -> None:
    server = serve()
    stream = Stream(server, 100)
    server.process.send_signal(number)
    assert eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503, 2)
    refused = httpx.post(f"{server.url}/v1/completions", json=body(1, False))
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert server.wait() == 0, server.output
    stream.join(5)
    assert stream.done and stream.broken is None
    assert stream.finish_reason == "length"
    assert len(stream.token_ids) == 100
    assert server.gone()
    assert not any(folder.iterdir())
    assert "Traceback" not in server.output


def test_what_runs_longer_than_the_drain_is_aborted(serve: Any) -> None:
    server = serve(timeout=0.5)
    stream = Stream(server, 3000)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0, server.output
    assert time.monotonic() - begin < 6.0
    stream.join(5)
    assert stream.finish_reason == "abort"
    assert stream.done and stream.broken is None
    assert "Traceback" not in server.output


def test_a_second_signal_forces_the_end(serve: Any, folder: Path) -> None:
    server = serve()
    stream = Stream(server, 3000)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    assert server.wait() == 130
    assert time.monotonic() - begin < 3.0
    stream.join(5)
    assert server.gone()
    assert not any(folder.iterdir())
    assert "Traceback" not in server.output


def test_kill_9_of_the_launcher_ends_everything(serve: Any) -> None:
    server = serve()
    stream = Stream(server, 3000)
    os.kill(server.process.pid, signal.SIGKILL)
    assert eventually(server.gone, 5.0)
    stream.join(5)
    server.end()


def test_kill_9_of_the_http_process_ends_the_rest(serve: Any, folder: Path) -> None:
    server = serve()
    stream = Stream(server, 3000)
    os.kill(server.pids["evensong:http-0"], signal.SIGKILL)
    assert server.wait() == 1
    stream.join(5)
    assert stream.broken is not None
    assert server.gone()
    assert not any(folder.iterdir())


def test_signals_to_the_children_are_the_launchers_business(serve: Any) -> None:
    """A terminal's Ctrl-C reaches only the launcher's group; a stray SIGINT to a child does nothing."""
    server = serve()
    stream = Stream(server, 60)
    for title in ("evensong:http-0", "evensong:core-0"):
        os.kill(server.pids[title], signal.SIGINT)
    stream.join(10)
    assert stream.finish_reason == "length" and stream.done
    assert httpx.get(f"{server.url}/health").status_code == 200
    groups = {os.getpgid(pid) for pid in server.pids.values()}
    assert len(groups) == 3
    assert "libtorch" not in Path(f"/proc/{server.pids['evensong:http-0']}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{server.pids['evensong:launcher']}/maps").read_text()
    # The native kernels need no torch either.
    assert "libtorch" not in Path(f"/proc/{server.pids['evensong:core-0']}/maps").read_text()
