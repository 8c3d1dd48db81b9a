"""Times of the native sampler beside the one in Python: python benchmarks/native_sampling.py [--repeats N] [--vocab N]

One thread, one row, gaussian logits of two spreads. Times are the best of several calls in microseconds: on a shared
machine the least disturbed call says most about the code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from evensong import _native as native
from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.host_draws import sample_rows
from evensong.sampling.logprobs import token_logprobs
from evensong.sampling.row import Float32, SamplingRow

# Name and settings: temperature, top_p, min_p, top_k.
SETTINGS = {
    "greedy": (0.0, 1.0, 0.0, 0),
    "temperature 1": (1.0, 1.0, 0.0, 0),
    "top_p 0.9": (1.0, 0.9, 0.0, 0),
    "min_p 0.05": (1.0, 1.0, 0.05, 0),
    "top_k 40": (1.0, 1.0, 0.0, 40),
    "top_k 1000": (1.0, 1.0, 0.0, 1000),
}
SEED, POSITION, NUM_BEST = 5, 17, 5


def best_us(call: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def python_calls(logits: Float32) -> dict[str, Callable[[], object]]:
    """The Python sampler with each of the settings."""
    calls: dict[str, Callable[[], object]] = {}
    for name, (temperature, top_p, min_p, top_k) in SETTINGS.items():
        params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=SEED)
        row = SamplingRow(params, np.zeros(POSITION, dtype=np.int64), [], [])
        calls[name] = lambda row=row: sample_rows(logits[None], [row], len(logits))
    calls["logprobs 5"] = lambda: token_logprobs(logits, 3, NUM_BEST)
    return calls


def native_calls(logits: Float32, isa: str) -> dict[str, Callable[[], object]]:
    """The native sampler with each of the settings."""
    calls: dict[str, Callable[[], object]] = {
        name: lambda given=given: native.draw(logits, *given, SEED, POSITION, isa) for name, given in SETTINGS.items()
    }
    calls["logprobs 5"] = lambda: native.logprobs(logits, 3, NUM_BEST, isa)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--vocab", type=int, default=49152)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    for spread in (1.0, 3.0):
        logits = (rng.standard_normal(arguments.vocab) * spread).astype(np.float32)
        columns = {isa: native_calls(logits, isa) for isa in native.supported_isas()}
        columns["python"] = python_calls(logits)
        print(f"\nspread {spread}, µs{'':8}" + "".join(f"{name:>14}" for name in columns))
        for setting in (*SETTINGS, "logprobs 5"):
            times = [best_us(calls[setting], arguments.repeats) for calls in columns.values()]
            print(f"{setting:20}" + "".join(f"{value:14.1f}" for value in times))


if __name__ == "__main__":
    main()
