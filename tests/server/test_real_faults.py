"""Death, signals and wrong commands with the real model: what waiters hear, what is left, which exit code."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.server.harness import Server, events

LONG = {"model": "demo", "prompt": "Tell me a story.", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def test_kill_9_of_the_core(tmp_path: Path, demo_model: Path) -> None:
    with Server(tmp_path / "log.txt") as server:
        core = server.child("evensong:core-0")
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60
        ) as response:
            stream = events(response)
            for _ in range(8):
                next(stream)
            killed = time.monotonic()
            core.send_signal(signal.SIGKILL)
            last = list(stream)[-1]
            assert time.monotonic() - killed < 1.5
        assert last["error"]["type"] == "engine_dead"
        health = server.client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["message"]
        assert server.post("/v1/completions", LONG).status_code in (500, 503)
        assert server.process.wait(timeout=15) == 1
        assert server.stop() == 1


def test_kill_9_of_the_launcher_while_it_streams(tmp_path: Path, demo_model: Path) -> None:
    with Server(tmp_path / "log.txt") as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60
        ) as response:
            next(events(response))
            server.process.kill()
            server.process.wait()
            assert not server.wait_gone(5)
        server.stop()


def test_health_first_then_a_drain_that_finishes_what_runs(tmp_path: Path, demo_model: Path) -> None:
    with Server(tmp_path / "log.txt", "--shutdown-timeout", "120", wait=False) as server:
        # Held where it is, so that it is still starting however long HTTP takes to come up.
        core = None
        while core is None:
            with contextlib.suppress(AssertionError):
                core = server.child("evensong:core-0")
        core.suspend()
        seen = None
        while seen is None:
            try:
                seen = server.client.get("/health")
            except httpx.TransportError:
                time.sleep(0.02)
        assert seen.status_code == 200
        assert server.client.get("/health/ready").status_code == 503
        assert server.post("/v1/completions", LONG).status_code == 503
        core.resume()
        server.wait_ready()
        body = {**LONG, "max_tokens": 48, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            chunks = list(stream)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        # Only waited for: another signal would force what is ending by itself.
        assert server.process.wait(timeout=60) == 0
        assert server.stop() == 0


def test_ctrl_c_while_the_model_loads(tmp_path: Path, demo_model: Path) -> None:
    with Server(tmp_path / "log.txt", wait=False) as server:
        time.sleep(1.5)
        assert server.stop(signal.SIGINT) == 0


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("serve", "demo", "--max-model-length", "5"), "did you mean --max-model-len?", 2),
        (("serve", "/nowhere/model.gguf", "--port", "0"), "no model", 2),
        (("serve", "demo", "--dtype", "int3"), "invalid choice", 2),
        (("serve", "demo", "--port", "99999"), "--port", 2),
        (("serve", "demo", "--port", "0", "--max-model-len", "9000"), "9000", 2),
        (("serv",), "did you mean 'serve'?", 2),
        (("chat", "--url", "http://127.0.0.1:9"), "no server answers", 1),
    ],
)
def test_mistakes_get_one_line(words: tuple[str, ...], says: str, code: int, demo_model: Path) -> None:
    result = run(*words)
    assert result.returncode == code, result.stderr
    complaints = [line for line in result.stderr.splitlines() if line.startswith("evensong")]
    assert len(complaints) == 1 and says in complaints[0], result.stderr
    assert "Traceback" not in result.stderr


def test_a_busy_port_gets_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "demo", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1 and "use" in result.stderr
