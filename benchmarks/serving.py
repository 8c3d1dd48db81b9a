"""Servers for a benchmark: started on a free port, ended with the block, their logs kept."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

READY_SECONDS = 180


@dataclass(frozen=True)
class Server:
    """A server that answers at `url`; `pid` is what was started, the parent of all its processes."""

    name: str
    url: str
    pid: int

    def processes(self) -> list[psutil.Process]:
        """All its processes."""
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Processor time that they have had so far."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self.processes()))

    def pause(self) -> None:
        """Takes it off the processors: while another one is measured it must not even poll."""
        for process in self.processes():
            process.suspend()

    def go_on(self) -> None:
        """Ends a pause."""
        for process in self.processes():
            process.resume()


@contextlib.contextmanager
def served(model: str, *flags: str, log: Path) -> Iterator[str]:
    """The address of `evensong serve MODEL FLAGS...`, ready. Raises SystemExit with the log's end if it is not."""
    # Client and server share the cores: threads that spin between products would take them from each other.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    with evensong_server(model, *flags, log=log, environment=environment) as server:
        yield server.url


@contextlib.contextmanager
def evensong_server(
    model: str, *flags: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`evensong serve MODEL FLAGS...` of this environment, ready."""
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", model, *flags]
    with _running("evensong", command, log, "/health/ready", environment or os.environ) as server:
        yield server


@contextlib.contextmanager
def vllm_server(python: str, model: str, *flags: str, log: Path, kv_bytes: int) -> Iterator[Server]:
    """`vllm serve MODEL FLAGS...` in the environment of the interpreter `python`, ready."""
    command = [str(Path(python).with_name("vllm")), "serve", model, *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(kv_bytes >> 30)}
    with _running("vllm", command, log, "/health", environment) as server:
        yield server


@contextlib.contextmanager
def _running(name: str, command: list[str], log: Path, ready: str, environment: Mapping[str, str]) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )
        server = Server(name, f"http://127.0.0.1:{port}", process.pid)
        try:
            _wait_ready(server.url + ready, process, log)
            yield server
        finally:
            _end(process, server)


def _end(process: subprocess.Popen[bytes], server: Server) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        server.go_on()
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(40)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")


def metric(url: str, name: str) -> float:
    """A counter or gauge of /metrics, summed over its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"evensong:{name}{{"))
