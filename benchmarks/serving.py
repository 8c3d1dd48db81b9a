"""A server of our own for a benchmark: started on a free port, ended with the block, its log kept."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

READY_SECONDS = 180


@contextlib.contextmanager
def served(model: str, *flags: str, log: Path) -> Iterator[str]:
    """The address of `evensong serve MODEL FLAGS...`, ready. Raises SystemExit with the log's end if it is not."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", model, "--port", str(port), *flags]
    # Client and server share the cores: threads that spin between products would take them from each other.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            _wait_ready(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(40)
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _wait_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")


def metric(url: str, name: str) -> float:
    """A counter or gauge of /metrics, summed over its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"evensong:{name}{{"))
