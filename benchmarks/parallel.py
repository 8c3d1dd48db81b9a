"""Ranks beside one core: PP=2 on two cores against PP=1 on one at 64 streams, and TP=2's latency of one stream.

    python benchmarks/parallel.py --pairs 5 --png pp2.png

All processes of a side, its client too, are confined to its cores in the same way. Sides take turns, and who begins
alternates. A table, then one JSON line: medians with min and max, the ratio pair by pair, and how long each stage
rested in a trace of the PP=2 run (`evensong profile`, which draws it as well).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import Machine
from pairs import Measured, in_turns, latency_row, run_parts, stages_row, throughput_row
from sides import LLMSide

PP_GOAL, IDLE_GOAL = 1.4, 0.1
PP_STREAMS, PROMPT_LEN, PP_OUTPUT, TP_OUTPUT = 64, 32, 128, 128
QUICK_OUTPUT = 24
PROFILE_OUTPUT, PROFILE_SECONDS = 64, 600
MAX_MODEL_LEN = 512
# 64 streams of 160 tokens take half of it.
KV_BYTES = 512 << 20
COMMON = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": PP_STREAMS, "log_level": "warning"}
SIDES: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    # part -> side -> number of cores, settings; the last one is what the part is about
    "pp": {"PP=1": (1, {}), "PP=2": (2, {"pipeline_parallel_size": 2})},
    "tp": {"TP=1": (1, {}), "TP=2": (2, {"tensor_parallel_size": 2})},
}


class Bench:
    """Runs the parts on the given cores."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._processors = options.processors or sorted(os.sched_getaffinity(0))[:2]
        if len(self._processors) < 2:
            raise SystemExit("two cores are needed")

    def part(self, name: str) -> dict[str, Any]:
        """One part's row; its sides live only as long."""
        opened: dict[str, LLMSide] = {}
        try:
            for side, (cores, settings) in SIDES[name].items():
                own = {"model": self._options.model, "kv_cache_memory_bytes": KV_BYTES, **COMMON, **settings}
                opened[side] = LLMSide(side, sys.executable, "evensong", own, self._processors[:cores])
                opened[side].settle()
                opened[side].pause()
            return self._throughput(opened) if name == "pp" else self._latency(opened)
        finally:
            for one in opened.values():
                one.close()

    def stages(self) -> dict[str, Any]:
        """A trace of the PP=2 side under the same load."""
        options = self._options
        with tempfile.TemporaryDirectory() as folder:
            trace = options.trace or f"{folder}/trace.json.gz"
            words = ["profile", options.model, "--pipeline-parallel-size", "2", "--output", trace]
            words += ["--num-prompts", str(PP_STREAMS), "--input-len", str(PROMPT_LEN)]
            words += ["--output-len", str(QUICK_OUTPUT if options.quick else PROFILE_OUTPUT)]
            words += ["--kv-cache-memory-bytes", str(KV_BYTES)]
            for key, value in COMMON.items():
                words += [f"--{key.replace('_', '-')}", str(value)]
            words += ["--png", options.png] if options.png else []
            done = subprocess.run(
                [sys.executable, "-m", "evensong.entrypoints.cli.main", *words],
                capture_output=True,
                text=True,
                timeout=PROFILE_SECONDS,
                preexec_fn=lambda: os.sched_setaffinity(0, self._processors[:2]),
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"evensong profile: {done.stderr.strip()[-500:]}")
        return stages_row(json.loads(done.stdout.splitlines()[-1]), IDLE_GOAL)

    def _throughput(self, sides: Mapping[str, LLMSide]) -> dict[str, Any]:
        output = QUICK_OUTPUT if self._options.quick else PP_OUTPUT

        def batch(side: LLMSide) -> Measured:
            return lambda seed: side.run(PP_STREAMS, PROMPT_LEN, output, seed)

        for side in sides.values():
            side.run(PP_STREAMS, PROMPT_LEN, 4, 0)
        seconds = in_turns({name: batch(side) for name, side in sides.items()}, self._options.pairs)
        return throughput_row(seconds, PP_STREAMS * output, PP_GOAL)

    def _latency(self, sides: Mapping[str, LLMSide]) -> dict[str, Any]:
        steps = QUICK_OUTPUT if self._options.quick else TP_OUTPUT

        def step(side: LLMSide) -> Measured:
            return lambda seed: side.decode_step(1, PROMPT_LEN, steps, seed)

        for side in sides.values():
            side.run(1, PROMPT_LEN, 8, 0)
        return latency_row(in_turns({name: step(side) for name, side in sides.items()}, self._options.pairs))


def main() -> int:
    """Exit code 1 where a part could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="pp,stages,tp", help="parts, comma-separated: pp, stages, tp")
    parser.add_argument(
        "--processors", default=None, type=lambda text: [int(n) for n in text.split(",")], help="two numbers: N,N"
    )
    parser.add_argument("--quick", action="store_true", help="one pair of short outputs: to see that all of it runs")
    parser.add_argument("--png", default=None, metavar="FILE", help="draw the trace of the PP=2 run")
    parser.add_argument("--trace", default=None, metavar="FILE", help="keep it")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the report to this file as well")
    options = parser.parse_args()
    options.pairs = 1 if options.quick else options.pairs
    bench = Bench(options)
    parts = {"pp": lambda: bench.part("pp"), "stages": bench.stages, "tp": lambda: bench.part("tp")}
    chosen = options.only.split(",")
    if not set(chosen) <= set(parts):
        raise SystemExit(f"--only takes {', '.join(parts)}")
    machine = Machine()
    before = machine.measure()
    report = run_parts({name: parts[name] for name in chosen})
    line = json.dumps({"machine": {**machine.describe(), "before_after": [before, machine.measure()]}, "parts": report})
    if options.json is not None:
        Path(options.json).write_text(f"{line}\n")
    print(line)
    return 1 if any("error" in row for row in report.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
