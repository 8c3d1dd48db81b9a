"""Workers killed with -9 at random moments while requests stream: when the slowest waiter hears it, what is left.

    python benchmarks/worker_kills.py --kills 50 --report worker-kills-report.json -- -tp 2

What follows `--` are flags of `evensong serve demo` (the workers are processes of their own in any case). Each kill
has a server of its own: streams begin, at a random moment of the time given one random worker is killed, and every
stream must end with the engine's death as its last event; then `/health` is 503 with the cause, the server ends with
code 1, and no process, shared memory or socket of it is left. One JSON line; exit code 1 where any of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

WAIT_SECONDS = 120.0
LIMIT_SECONDS = 1.0
PROMPT = "Once upon a time, in a village by the sea, there lived"


class Stream:
    """One request: when it ended, and with what."""

    def __init__(self, url: str, seed: int) -> None:
        self.num_tokens = 0
        self.ended = 0.0
        self.last = ""
        self._url = url
        self._body = {
            "model": "demo",
            "prompt": PROMPT,
            "max_tokens": 1900,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
        }
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def told(self) -> bool:
        """Whether it heard that the engine died, and of what: as its last event, or as the refusal of its request."""
        return "killed by SIGKILL" in self.last and ("engine_dead" in self.last or "the engine died" in self.last)

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=WAIT_SECONDS) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {") or line.startswith("{"):
                        self.last = line
                        self.num_tokens += 1
        except httpx.HTTPError as error:
            self.last = repr(error)
        self.ended = time.monotonic()


class Server:
    """One server in a session of its own; `folder` is where its sockets come to lie."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", "demo", "--port", "0"]
        command += ["--distributed-executor-backend", "mp", *flags]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            start_new_session=True,
        )
        self.url = self._wait_ready()
        launcher = psutil.Process(self.process.pid)
        self.family = [launcher, *launcher.children(recursive=True)]
        self.workers = [p for p in self.family if p.cmdline()[0].strip().startswith("evensong:worker-")]

    def _wait_ready(self) -> str:
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            self._log.seek(0)
            found = re.search(r"http://127\.0\.0\.1:\d+", self._log.read())
            with contextlib.suppress(httpx.TransportError):
                if found and httpx.get(f"{found[0]}/health/ready").status_code == 200:
                    return found[0]
            time.sleep(0.1)
        self._log.seek(0)
        raise RuntimeError(f"the server did not start: {self._log.read()[-1000:]}")

    def end(self) -> tuple[int, list[str]]:
        """Waits for the end; the exit code, and the processes that are left after it."""
        code = self.process.wait(30)
        self._log.close()
        _, alive = psutil.wait_procs(self.family, 2)
        left = []
        for process in alive:
            left.append(f"{process.pid} {process.name()}")
            with contextlib.suppress(psutil.Error):
                process.kill()
        return code, left


def kill_once(streams: int, seconds: float, flags: list[str], generator: random.Random) -> dict[str, object]:
    """One server, one kill."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), flags)
        began = [Stream(f"{server.url}/v1/completions", seed) for seed in range(streams)]
        moment = generator.uniform(0.0, seconds)
        time.sleep(moment)
        # A stream whose headers are not there yet is admitted or refused like any other request.
        victim = generator.choice(server.workers)
        title = victim.cmdline()[0].strip()
        killed = time.monotonic()
        victim.kill()
        for stream in began:
            stream.thread.join(WAIT_SECONDS)
        health = httpx.get(f"{server.url}/health")
        code, left = server.end()
        left += [str(path) for path in Path(folder).iterdir()]
    left += [str(path) for path in Path("/dev/shm").glob("*") if "evensong" in path.name]
    return {
        "victim": title,
        "moment": round(moment, 3),
        "tokens": sum(stream.num_tokens for stream in began),
        "slowest_s": round(max(stream.ended for stream in began) - killed, 3),
        "untold": [stream.last[:200] for stream in began if not stream.told],
        "health": health.status_code if "killed by SIGKILL" in health.text else 0,
        "code": code,
        "left": left,
    }


def is_good(kill: dict[str, object]) -> bool:
    """Whether everything went as it must."""
    in_time = isinstance(kill["slowest_s"], float) and kill["slowest_s"] <= LIMIT_SECONDS
    return in_time and not kill["untold"] and kill["health"] == 503 and kill["code"] == 1 and not kill["left"]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="the kill comes within so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="file for the figures (JSON)")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    kills = []
    for number in range(options.kills):
        kills.append(kill_once(options.streams, options.seconds, options.flags, generator))
        print(f"{number + 1}/{options.kills}: {json.dumps(kills[-1])}", file=sys.stderr, flush=True)
    slowest = sorted(float(str(kill["slowest_s"])) for kill in kills)
    bad = [kill for kill in kills if not is_good(kill)]
    figures = {
        "flags": options.flags,
        "kills": len(kills),
        "streams": options.streams,
        "slowest_s": slowest[-1],
        "median_s": statistics.median(slowest),
        "bad": bad,
    }
    line = json.dumps(figures)
    if options.report:
        options.report.write_text(json.dumps({**figures, "each": kills}) + "\n")
    print(line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
