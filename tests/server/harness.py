"""A real `evensong serve demo` for a test module, and the survivor check."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_SECONDS = 120
# A greedy completion that every survivor check repeats.
KNOWN = {"model": "demo", "prompt": "The history of the city begins", "max_tokens": 12, "temperature": 0}
NEIGHBOUR = {
    "model": "demo",
    "prompt": "Once upon a time, in a village by the sea,",
    "max_tokens": 64,
    "temperature": 0.8,
    "seed": 11,
    "ignore_eos": True,
    "stream": True,
}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Starts on construction; `stop()` asserts that nothing of it is left."""

    def __init__(self, log: Path, *flags: str, model: str = "demo", wait: bool = True) -> None:
        self.port = free_port()
        tls = dict(zip(flags, flags[1:], strict=False)).get("--ssl-certfile")
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.log = log
        self._log_file = open(log, "w")  # noqa: SIM115 - closed by stop()
        command = [
            sys.executable,
            "-m",
            "evensong.entrypoints.cli.main",
            "serve",
            model,
            "--port",
            str(self.port),
            *flags,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "EVENSONG_CHECK_KV": "1"},
            start_new_session=True,
        )
        self.family: set[psutil.Process] = set()
        # A self-signed certificate vouches for itself.
        verify = ssl.create_default_context(cafile=tls) if tls else True
        self.client = httpx.Client(base_url=self.url, timeout=120, verify=verify)
        if wait:
            self.wait_ready()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        """Whatever the test left running ends here."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.client.close()
        self._log_file.close()

    def wait_ready(self) -> None:
        """Until /health/ready says 200."""
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-2000:]}"
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health/ready").status_code == 200:
                    self.remember()
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready in {READY_SECONDS} s: {self.log.read_text()[-2000:]}")

    def remember(self) -> None:
        """Notes the processes of the server, to see later that they are gone."""
        launcher = psutil.Process(self.process.pid)
        self.family |= {launcher, *launcher.children(recursive=True)}

    def child(self, title: str) -> psutil.Process:
        """The process with a title such as `evensong:core-0`."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline() and process.cmdline()[0].strip() == title:
                    return process
        raise AssertionError(f"no process {title}")

    def left(self) -> list[str]:
        """Processes of the server that still run."""
        alive = []
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{process.pid} {process.cmdline()}")
        return alive

    def wait_gone(self, seconds: float) -> list[str]:
        """Waits until no process of the server is left; those that are after `seconds`."""
        until = time.monotonic() + seconds
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        return self.left()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the server; returns its exit code."""
        if self.process.poll() is None:
            self.remember()
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.client.close()
            self._log_file.close()
        assert not self.wait_gone(5), self.left()
        return code

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """A POST of a JSON body."""
        return self.client.post(path, json=body)

    def text(self, body: dict[str, Any]) -> str:
        """The text of a completion that must succeed."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until no generation request is in hand: one is for a moment after its last byte."""
        until = time.monotonic() + seconds
        while (load := self.client.get("/load").json()) != {"server_load": 0}:
            assert time.monotonic() < until, load
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"evensong:{name}{{",))]
        assert values, name
        return sum(values)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, up to [DONE]."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


class Neighbour:
    """A streaming request that runs beside a test; `finish()` gives its text."""

    def __init__(self, server: Server, body: dict[str, Any] | None = None) -> None:
        self._server = server
        self._body = body or NEIGHBOUR
        self.text = ""
        self.error: BaseException | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._began.wait(60), "the neighbour never got a token"

    def _run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=self._body, timeout=120) as response:
                for event in events(response):
                    assert "error" not in event, event
                    self.text += event["choices"][0]["text"]
                    self._began.set()
        except BaseException as error:
            self.error = error
        finally:
            self._began.set()

    @property
    def running(self) -> bool:
        """True while it still streams."""
        return self._thread.is_alive()

    def finish(self) -> str:
        """The whole text; raises what it ended with."""
        self._thread.join(120)
        if self.error is not None:
            raise self.error
        return self.text


class Survivors:
    """The survivor check: what the server said before anything bad came, and whether it still says it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.known = server.text(KNOWN)
        self.neighbour = Neighbour(server).finish()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """A neighbour streams while the body runs; then health, the known answer and the neighbour are checked."""
        neighbour = Neighbour(self.server)
        yield
        assert self.server.client.get("/health").status_code == 200
        assert self.server.text(KNOWN) == self.known
        assert neighbour.finish() == self.neighbour
