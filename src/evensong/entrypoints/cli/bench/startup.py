"""`evensong bench startup`: seconds from the command to /health, to ready, and to the first token over HTTP.

A cold start finds the model's file out of the page cache, as after a boot; a warm one finds it there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from evensong.entrypoints.cli.bench.latency import percentiles
from evensong.entrypoints.cli.bench.offline import add_offline_flags, engine_settings
from evensong.entrypoints.cli.bench.report import show
from evensong.entrypoints.cli.flags import Parser
from evensong.entrypoints.cli.keys import keys_in_environment
from evensong.protocol.errors import ConfigError, EngineStartError
from evensong.sources.resolve import resolve_model

READY_SECONDS = 600.0
POLL_SECONDS = 0.01
EVENTS = ("health", "startup", "first_token")


def make_parser() -> Parser:
    """vLLM's flags for its start-up benchmark, and the engine's."""
    parser = Parser(prog="evensong bench startup", description="Start-up times of the server.")
    parser.add_argument("--num-iters-cold", type=int, default=3, help="starts with the model's file not in memory")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="starts between, which do not count")
    parser.add_argument("--num-iters-warm", type=int, default=3, help="starts with the model's file in memory")
    add_offline_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Starts the server again and again; a table, then one JSON line with vLLM's keys (`startup` is until ready)."""
    words = list(arguments)
    options = make_parser().parse_args(words)
    counts = {"cold": options.num_iters_cold, "warm": options.num_iters_warm}
    if min(*counts.values(), options.num_iters_warmup) < 0 or not any(counts.values()):
        raise ConfigError("--num-iters-cold, --num-iters-warmup and --num-iters-warm must be 0 or more, and not all 0")
    engine_settings(options)
    path = resolve_model(options.model, revision=getattr(options, "revision", None)).path
    flags = _server_flags(words)
    result: dict[str, Any] = {"import_time": import_seconds()}
    lines = [f"{'import evensong (s)':<28}{result['import_time']:>10.3f}"]
    for kind, count in counts.items():
        for _ in range(options.num_iters_warmup if kind == "warm" and count else 0):
            one_start(options.model, flags)
        starts = []
        for _ in range(count):
            if kind == "cold":
                forget_file(path)
            starts.append(one_start(options.model, flags))
        for event in EVENTS if starts else ():
            values = [start[event] for start in starts]
            result |= {
                f"avg_{kind}_{event}_time": statistics.fmean(values),
                f"{kind}_{event}_times": values,
                f"{kind}_{event}_percentiles": percentiles(values),
            }
            label = f"{kind}, to {'ready' if event == 'startup' else event.replace('_', ' ')} (s)"
            lines.append(f"{label:<28}{statistics.fmean(values):>10.3f}   {min(values):.3f} to {max(values):.3f}")
    show("\n".join(lines), result, options.output_json)
    return 0


def one_start(model: str, flags: Sequence[str] = ()) -> dict[str, float]:
    """Seconds from the command to each of EVENTS. Raises EngineStartError when the server does not come up."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", model, "--port", str(port), *flags]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        # A key that the environment sets is the server's too.
        key = next(iter(keys_in_environment()), None)
        with httpx.Client(timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
            _wait_for(f"{base}/health", client, server)
            health = time.perf_counter() - start
            _wait_for(f"{base}/health/ready", client, server)
            ready = time.perf_counter() - start
            client.post(f"{base}/v1/completions", json={"prompt": "Hello", "max_tokens": 1}).raise_for_status()
            first = time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    return {"health": health, "startup": ready, "first_token": first}


def _wait_for(url: str, client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    """Until the address answers 200."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            assert server.stderr is not None
            last = server.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise EngineStartError(f"the server ended with code {server.returncode}: {last:.300}")
        with contextlib.suppress(httpx.TransportError):
            if client.get(url).status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    raise EngineStartError(f"{url} did not answer within {READY_SECONDS:g} s")


def import_seconds() -> float:
    """`import evensong`, without the interpreter's own start."""
    program = "import time; t = time.perf_counter(); import evensong; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def forget_file(path: Path) -> None:
    """Asks the kernel to drop a model's file, or a folder's, from the page cache; where it cannot, nothing happens."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with contextlib.suppress(OSError, AttributeError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _server_flags(words: Sequence[str]) -> list[str]:
    """The words that are the engine's flags, for the server's own command line."""
    own = Parser(add_help=False)
    for name in ("--num-iters-cold", "--num-iters-warmup", "--num-iters-warm", "--model", "--output-json"):
        own.add_argument(name)
    return own.parse_known_args(list(words))[1]
