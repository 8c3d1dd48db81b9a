"""How long the worker is idle between the end of one step and the start of the next, with and without a step ahead.

    python benchmarks/step_gaps.py [--model demo] [--streams 32] [--steps 300] [--rounds 3]

A core without a front end runs greedy streams; the native engine notes when each step begins and ends. Rounds with and
without one step ahead take turns. Prints one line a round, and then JSON: microseconds, by way of planning.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np

from evensong.config.resolve import resolve
from evensong.engine.core.core import EngineCore
from evensong.executor.uniproc import UniProcExecutor
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams

PROMPT_TOKENS = 16
WARM_UP_STEPS = 20


def gaps(model: str, ahead: bool, streams: int, steps: int) -> list[float]:
    """Microseconds between steps in which all streams decode."""
    settings = {"model": model, "async_scheduling": ahead, "max_num_seqs": streams, "log_level": "warning"}
    config = resolve(settings | {"max_model_len": PROMPT_TOKENS + steps + 2 * WARM_UP_STEPS + 8})
    executor: list[UniProcExecutor] = []

    def make() -> UniProcExecutor:
        executor.append(UniProcExecutor(config))
        return executor[0]

    core = EngineCore(config, make)
    try:
        for index in range(streams):
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + 2 * WARM_UP_STEPS)
            core.add_request(EngineCoreRequest(str(index), list(range(index, index + PROMPT_TOKENS)), params))
        for _ in range(WARM_UP_STEPS):
            core.step()
        engine: Any = executor[0]._worker._device._engine
        engine.take_steps()
        engine.record_spans(True)
        for _ in range(steps):
            core.step()
        engine.record_spans(False)
        noted = engine.take_steps()
    finally:
        core.shutdown()
    noted = noted[noted[:, 3] == streams]
    return list((noted[1:, 1] - noted[:-1, 2]) / 1e3)


def summary(values: list[float]) -> dict[str, float]:
    """What is told of a list of gaps, in microseconds."""
    return {
        "median": round(float(statistics.median(values)), 1),
        "p90": round(float(np.percentile(values, 90)), 1),
        "max": round(float(max(values)), 1),
        "steps": len(values),
    }


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"one step ahead": [], "one after the other": []}
    for number in range(options.rounds):
        for name, ahead in (("one step ahead", True), ("one after the other", False)):
            own = gaps(options.model, ahead, options.streams, options.steps)
            found[name] += own
            print(f"round {number + 1}, {name}: {summary(own)}", flush=True)
    print(json.dumps({name: summary(values) for name, values in found.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
