"""Workers in processes of their own that die, hang or cannot start, with the real model: who hears it, what is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import Server, events

LONG = {"model": "demo", "prompt": "Tell me a story.", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
MP = ("--distributed-executor-backend", "mp")
# Grids, each with the rank that is hurt.
GRIDS = [((), 0), (("--tensor-parallel-size", "2"), 0), (("--pipeline-parallel-size", "2"), 0), (("-pp", "2"), 1)]


class Waiter:
    """A stream beside the test: counts its tokens, and notes how and when it ended."""

    def __init__(self, server: Server, seed: int) -> None:
        self.num_events = 0
        self.last: dict[str, Any] = {}
        self.ended = 0.0
        self._url = f"{server.url}/v1/completions"
        self._body = {**LONG, "temperature": 0.8, "seed": seed, "stream": True}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            for event in events(response):
                self.num_events += 1
                self.last = event
        self.ended = time.monotonic()

    def wait_for(self, num_events: int) -> None:
        until = time.monotonic() + 60
        while self.num_events < num_events:
            assert self._thread.is_alive() and time.monotonic() < until, self.last
            time.sleep(0.01)

    def finish(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launch may leave behind: shared memory with a name, folders of sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield
        assert not list(Path(folder).iterdir())
        assert not [path for path in Path("/dev/shm").glob("*") if "evensong" in path.name]


@pytest.mark.parametrize(("grid", "victim"), GRIDS)
def test_kill_9_of_a_worker(
    tmp_path: Path, demo_model: Path, grid: tuple[str, ...], victim: int, nothing_named: None
) -> None:
    with Server(tmp_path / "log.txt", *MP, *grid) as server:
        worker = server.child(f"evensong:worker-0.{victim}")
        waiters = [Waiter(server, seed) for seed in range(3)]
        for waiter in waiters:
            waiter.wait_for(48)
        killed = time.monotonic()
        worker.send_signal(signal.SIGKILL)
        for waiter in waiters:
            waiter.finish()
            assert waiter.last["error"]["type"] == "engine_dead"
            assert f"worker 0.{victim} killed by SIGKILL" in waiter.last["error"]["message"]
        assert max(waiter.ended for waiter in waiters) - killed < 1
        health = server.client.get("/health")
        assert health.status_code == 503
        assert f"worker 0.{victim} killed by SIGKILL" in health.json()["error"]["message"]
        assert server.post("/v1/completions", LONG).status_code in (500, 503)
        assert server.process.wait(timeout=15) == 1
        assert server.stop() == 1


def test_kill_9_of_an_idle_worker(tmp_path: Path, demo_model: Path, nothing_named: None) -> None:
    with Server(tmp_path / "log.txt", *MP) as server:
        server.child("evensong:worker-0.0").send_signal(signal.SIGKILL)
        until = time.monotonic() + 1
        while server.client.get("/health").status_code != 503:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert server.process.wait(timeout=15) == 1
        assert server.stop() == 1


@pytest.mark.parametrize("grid", [(), ("-pp", "2")])
def test_kill_9_of_a_worker_that_loads(
    tmp_path: Path, demo_model: Path, grid: tuple[str, ...], nothing_named: None
) -> None:
    last = len(grid) // 2
    with Server(tmp_path / "log.txt", *MP, *grid, wait=False) as server:
        worker = None
        while worker is None:
            assert server.process.poll() is None
            # Its title comes once it has its orders.
            with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
                worker = server.child(f"evensong:worker-0.{last}")
        server.remember()
        worker.send_signal(signal.SIGKILL)
        assert server.process.wait(timeout=15) == 1
        assert server.stop() == 1
        assert f"worker 0.{last} killed by SIGKILL" in server.log.read_text().splitlines()[-1]


@pytest.mark.parametrize(("grid", "victim"), GRIDS)
def test_a_stopped_worker_meets_the_time_limit(
    tmp_path: Path, demo_model: Path, grid: tuple[str, ...], victim: int, nothing_named: None
) -> None:
    with Server(tmp_path / "log.txt", *MP, *grid, "--worker-timeout", "2") as server:
        waiter = Waiter(server, 5)
        waiter.wait_for(8)
        stopped = time.monotonic()
        server.child(f"evensong:worker-0.{victim}").suspend()
        waiter.finish()
        assert 1.5 < waiter.ended - stopped < 4
        assert f"rank {victim} did not answer in 2 s" in waiter.last["error"]["message"]
        assert server.process.wait(timeout=15) == 1
        assert server.stop() == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_9_of_the_core_takes_its_workers(tmp_path: Path, demo_model: Path, stopped: bool) -> None:
    with Server(tmp_path / "log.txt", *MP) as server:
        waiter = Waiter(server, 7)
        waiter.wait_for(8)
        worker, core = server.child("evensong:worker-0.0"), server.child("evensong:core-0")
        if stopped:
            worker.suspend()
        core.send_signal(signal.SIGKILL)
        waiter.finish()
        assert waiter.last["error"]["type"] == "engine_dead"
        gone, _ = psutil.wait_procs([worker], 5)
        assert gone
        assert server.process.wait(timeout=15) == 1
        assert server.stop() == 1


def test_a_drain_ends_workers_too(tmp_path: Path, demo_model: Path, nothing_named: None) -> None:
    with Server(tmp_path / "log.txt", *MP) as server:
        body = {**LONG, "max_tokens": 48, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(timeout=60) == 0
        assert server.stop() == 0


def test_a_rank_that_cannot_load_is_heard_in_its_own_words(tmp_path: Path, demo_model: Path) -> None:
    """A damaged file: the same line and the same exit code as from a worker inside the core."""
    weights = tmp_path / "damaged.gguf"
    shutil.copy(demo_model, weights)
    os.truncate(weights, weights.stat().st_size // 2)
    said = []
    for backend in ("uni", "mp"):
        command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", str(weights), "--port", "0"]
        command += ["--distributed-executor-backend", backend]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        said.append((result.returncode, result.stderr))
    assert said[0] == said[1]
    code, line = said[1]
    assert code == 2 and len(line.splitlines()) == 1 and weights.name in line, line
