"""Throughput beside a peer: the same batches on both sides, in turn, in the same minutes.

    python benchmarks/pair.py --peer-python PATH --peer-model FOLDER --pairs 5

The peer is any engine with vLLM's `LLM` class in another environment. Without --peer-python only evensong is measured.
A table, then one JSON line: medians with min and max, and the ratio pair by pair.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from typing import Any

# Both sides' KV cache.
KV_BYTES = 2 << 30

# Runs in either environment: reads "n prompt_len output_len seed" lines, answers seconds.
PROGRAM = """
import json, os, random, sys, time
if __name__ == "__main__":
    # Engines and their child processes log to what they think is standard output.
    out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
    settings = json.loads(sys.argv[2])
    if sys.argv[1] == "evensong":
        from evensong import LLM, SamplingParams
    else:
        from vllm import LLM, SamplingParams
    llm = LLM(**settings)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        n, plen, olen, seed = map(int, line.split())
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": [rng.randrange(10, 40000) for _ in range(plen)]} for _ in range(n)]
        params = SamplingParams(temperature=0, max_tokens=olen, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - start, file=out, flush=True)
"""


class Side:
    """One engine in a process of its own."""

    def __init__(self, python: str, kind: str, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30)}
        self._process = subprocess.Popen(
            [python, "-c", PROGRAM, kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._answer()

    def pause(self) -> None:
        """Stops its processes: an engine that polls while it has nothing to do would take the other side's cores."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def run(self, n: int, prompt_len: int, output_len: int, seed: int) -> float:
        """Output tokens per second of one batch, prompt time included."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(f"{n} {prompt_len} {output_len} {seed}\n")
        self._process.stdin.flush()
        seconds = float(self._answer())
        self.pause()
        return n * output_len / seconds

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[0]!r} ended early")  # type: ignore[index]
        return line.strip()


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def main() -> int:
    """Measures each shape in pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default=None)
    parser.add_argument("--peer-model", default=None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shapes", default="1x32x128,32x128x128", help="streams x prompt x output, comma-separated")
    options = parser.parse_args()
    common = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64}
    own = {"model": options.model, "log_level": "warning", "kv_cache_memory_bytes": KV_BYTES}
    ours = Side(sys.executable, "evensong", own | common)
    peer = Side(options.peer_python, "vllm", {"model": options.peer_model, **common}) if options.peer_python else None
    sides = [side for side in (ours, peer) if side is not None]
    for side in sides:
        side.pause()
    report = {}
    seed = 0
    for shape in options.shapes.split(","):
        n, prompt_len, output_len = (int(part) for part in shape.split("x"))
        for side in sides:
            side.run(n, prompt_len, 4, seed)
        rates: list[list[float]] = [[] for _ in sides]
        for _ in range(options.pairs):
            # No prompt comes twice, in whole or in part: neither side's prefix cache helps it.
            seed += 1
            for place, side in enumerate(sides):
                rates[place].append(side.run(n, prompt_len, output_len, seed))
        seed += 1
        row: dict[str, Any] = {"evensong": spread(rates[0])}
        if peer is not None:
            row["peer"] = spread(rates[1])
            row["ratio"] = spread([a / b for a, b in zip(rates[0], rates[1], strict=True)])
        report[shape] = row
        print(f"{shape:<14}{row}", flush=True)
    for side in sides:
        side.close()
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
