"""Throughput beside a busy process, against the share of the processors that it leaves.

    python benchmarks/beside_load.py --pairs 5

Batches of 32 streams with and without one process that keeps a core's worth of work busy, in turn. The engine may lose
what the busy process takes, but no more: its throughput falls to the share of processor time that it still had. Where
it falls further, its threads waited for one another. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from sides import LLMSide
from throughput import add_flags, open_sides, show, spread

from evensong.utils.machine import usable_cpus

STREAMS, PROMPT_LEN, OUTPUT_LEN = 32, 128, 128
# No other workload's prompts.
FIRST_SEED = 1_000_000


@contextlib.contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """One process that computes for as long as the block lasts, on whatever core the system gives it."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.2)  # until it computes and no longer starts
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(side: LLMSide, pairs: int) -> dict[str, Any]:
    """Tokens per second and processor share with and without load; what is lost beyond the share."""
    cores = usable_cpus()
    seeds = itertools.count(FIRST_SEED)
    rates: dict[bool, list[float]] = {False: [], True: []}
    shares: dict[bool, list[float]] = {False: [], True: []}
    side.run(STREAMS, PROMPT_LEN, 4, next(seeds))
    for pair in range(pairs):
        for loaded in (False, True) if pair % 2 == 0 else (True, False):
            with busy_process(loaded):
                before = side.cpu_seconds()
                seconds = side.run(STREAMS, PROMPT_LEN, OUTPUT_LEN, next(seeds))
                shares[loaded].append((side.cpu_seconds() - before) / seconds / cores)
            rates[loaded].append(STREAMS * OUTPUT_LEN / seconds)
    speed = [loaded / quiet for quiet, loaded in zip(rates[False], rates[True], strict=True)]
    share = [loaded / quiet for quiet, loaded in zip(shares[False], shares[True], strict=True)]
    return {
        "quiet": {"tokens_per_s": spread(rates[False]), "cpu_share": spread(shares[False], 3)},
        "loaded": {"tokens_per_s": spread(rates[True]), "cpu_share": spread(shares[True], 3)},
        "throughput_ratio": spread(speed, 3),
        "cpu_ratio": spread(share, 3),
        # Below 1: lost to more than the processor time that the load took.
        "throughput_to_cpu": spread([a / b for a, b in zip(speed, share, strict=True)], 3),
        # One model thread a core and the load, all treated alike.
        "fair_share": round(cores / (cores + 1), 3),
    }


def print_report(report: dict[str, Any]) -> None:
    """A line for each state, then the ratios."""
    for state in ("quiet", "loaded"):
        one = report[state]
        print(f"  {state:<12}{show(one['tokens_per_s']):<28}{show(one['cpu_share'])} of the processors")
    print(f"  throughput falls to {show(report['throughput_ratio'])}, processor time to {show(report['cpu_ratio'])}")
    print(
        f"  throughput to processor time {show(report['throughput_to_cpu'])}; fair share {report['fair_share']}",
        flush=True,
    )


def main() -> int:
    """Measures evensong, and vLLM where it is set up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    options = parser.parse_args()
    report = {}
    with open_sides(options) as (_, sides):
        for side in sides:
            if isinstance(side, LLMSide):
                print(side.name)
                report[side.name] = measure(side, options.pairs)
                print_report(report[side.name])
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
