"""Time to first token of an urgent request on an idle server, and on one whose slots are full of less urgent ones.

    python benchmarks/priority.py --slots 8 --urgent 8

Through a real server, with streams. `while_decoding`: all slots generate when it comes; `while_reading`: they still
compute long prompts; `equal_priority`: one that is not more urgent, for comparison. Every low request must end with the
bytes that it has alone. A table, then one JSON line; exit code 1 where bytes differ.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

LOW_PRIORITY, URGENT = 10, 0


class Stream:
    """One streamed completion, read in a thread of its own."""

    def __init__(self, base: str, body: dict[str, Any]) -> None:
        self.started = threading.Event()
        self.text = ""
        self.first_token = 0.0
        self._left = False
        self._begin = time.perf_counter()
        self._thread = threading.Thread(target=self._read, args=(base, body), daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """False once its last token is here."""
        return self._thread.is_alive()

    def join(self) -> str:
        """The whole text."""
        self._thread.join()
        return self.text

    def stop(self) -> str:
        """Leaves; the text so far."""
        self._left = True
        return self.join()

    def _read(self, base: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{base}/v1/completions", json={**body, "stream": True}, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not self.started.is_set():
                    self.first_token = time.perf_counter() - self._begin
                    self.started.set()
                self.text += json.loads(line[6:])["choices"][0]["text"]
                if self._left:
                    return


class Bench:
    """A server and the requests that it gets; no prompt comes twice."""

    def __init__(self, base: str, options: argparse.Namespace) -> None:
        self.base = base
        self.options = options
        self._random = random.Random(0)

    def body(self, prompt_len: int, max_tokens: int, priority: int) -> dict[str, Any]:
        """A greedy request with a random prompt."""
        prompt = [self._random.randrange(10, 40000) for _ in range(prompt_len)]
        fixed = {"model": self.options.model, "temperature": 0, "ignore_eos": True}
        return {**fixed, "prompt": prompt, "max_tokens": max_tokens, "priority": priority}

    def first_token(self, priority: int) -> float:
        """Seconds to the first token of a short request; it is over when this returns."""
        stream = Stream(self.base, self.body(16, 4, priority))
        stream.join()
        return stream.first_token

    def loaded(self, prompt_len: int, wait: bool, priority: int, max_tokens: int) -> dict[str, Any]:
        """First-token times while all slots hold low requests that would go on for `max_tokens` tokens."""
        bodies = [self.body(prompt_len, max_tokens, LOW_PRIORITY) for _ in range(self.options.slots)]
        streams = [Stream(self.base, body) for body in bodies]
        for stream in streams if wait else streams[:1]:
            stream.started.wait(600)
        times = []
        for _ in range(self.options.urgent):
            time.sleep(self._random.random() * 0.2)
            times.append(self.first_token(priority))
        # The last to come is the first to be displaced; it must have gone on since.
        had = len(streams[-1].text)
        while len(streams[-1].text) < had + 40 and wait and streams[-1].running:
            time.sleep(0.05)
        texts = [stream.stop() for stream in streams]
        alone = Stream(self.base, {**bodies[-1], "max_tokens": 48}).join()
        return {"seconds": spread(times), "low_bytes_equal": _agree(alone, texts[-1])}


def _agree(one: str, other: str) -> bool:
    """True when the shorter text begins the longer one."""
    return one.startswith(other) or other.startswith(one)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def wait_ready(base: str) -> None:
    """Until the server takes work."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            if httpx.get(f"{base}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server is not ready after 120 s")


def measure(bench: Bench) -> dict[str, Any]:
    """All figures."""
    options = bench.options
    bench.first_token(URGENT)
    idle = [bench.first_token(URGENT) for _ in range(options.urgent)]
    report: dict[str, Any] = {"idle": {"seconds": spread(idle)}}
    print("idle", report["idle"], flush=True)
    report["while_decoding"] = bench.loaded(16, True, URGENT, 2000)
    print("while_decoding", report["while_decoding"], flush=True)
    report["while_reading"] = bench.loaded(options.low_prompt, False, URGENT, 2000)
    print("while_reading", report["while_reading"], flush=True)
    bench.options.urgent = 1
    report["equal_priority"] = bench.loaded(16, True, LOW_PRIORITY, options.low_tokens)
    for name in ("while_decoding", "while_reading", "equal_priority"):
        row = report[name]
        row["times_idle"] = round(row["seconds"]["median"] / report["idle"]["seconds"]["median"], 2)
    return report


def main() -> int:
    """Starts the server, measures, ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--urgent", type=int, default=8, help="urgent requests to measure")
    parser.add_argument("--low-tokens", type=int, default=128, help="output tokens of an equal one that it waits for")
    parser.add_argument("--low-prompt", type=int, default=1000, help="prompt tokens of a low request that reads")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not stay behind
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", options.model, "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--max-num-seqs", str(options.slots)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        base = f"http://127.0.0.1:{port}"
        wait_ready(base)
        report = measure(Bench(base, options))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    for name, row in report.items():
        print(f"{name:<16}{row}")
    print(json.dumps({"slots": options.slots, **report}))
    return 0 if all(row.get("low_bytes_equal", True) for row in report.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
