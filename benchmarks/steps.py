"""What a step of the native engine is made of: python benchmarks/steps.py [MODEL] [--dtype D] [--repeats N]

For steps of several shapes: the shortest and the median time, and of one traced step the milliseconds of all threads
together in each op. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from typing import Any

import numpy as np

from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import SamplingRow
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import source_digest
from evensong.worker.batch import Batch
from evensong.worker.device import DeviceSettings, ModelFiles
from evensong.worker.native_device import NativeDevice

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 4200, 4352
# (name, requests, new tokens of each, tokens of each already in the cache)
STEPS = (
    ("1 at 100", 1, 1, 100),
    ("8 at 100", 8, 1, 100),
    ("32 at 192", 32, 1, 192),
    ("64 at 192", 64, 1, 192),
    ("8 at 4000", 8, 1, 4000),
    ("prompt of 512", 1, 512, 0),
    ("4 prompts of 128", 4, 128, 0),
)


def load(model: str, dtype: str) -> tuple[NativeDevice, int]:
    """The device with the model and a cache, and the model's vocabulary size."""
    source = resolve_model(model)
    description = load_model_description(source)
    device = NativeDevice(DeviceSettings("cpu", dtype))
    device.load(ModelFiles(source, description, lambda: source_digest(source)), show=False)
    device.prepare(KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE), MAX_LEN, description.vocab_size)
    return device, description.vocab_size


def make_step(requests: int, count: int, context: int, vocab_size: int) -> tuple[Batch, list[SamplingRow]]:
    """Greedy requests, each in blocks of its own as long as there are enough."""
    needed = -(-(context + count) // BLOCK_SIZE)
    tables = [np.arange(i * needed, (i + 1) * needed, dtype=np.int32)[None] % NUM_BLOCKS for i in range(requests)]
    tokens = np.random.default_rng(0).integers(0, vocab_size, requests * count)
    empty = np.zeros(0, dtype=np.int64)
    rows = [SamplingRow(SamplingParams(temperature=0.0), empty, empty, []) for _ in range(requests)]
    last = count * np.arange(1, requests + 1) - 1
    return Batch(tokens, [count] * requests, [context] * requests, tables, last), rows


def measure(device: Any, batch: Batch, rows: list[SamplingRow], repeats: int) -> dict[str, Any]:
    """Times in milliseconds."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        device.start(batch, rows).wait()
        times.append(1e3 * (time.perf_counter() - start))
    engine, program = device._engine, device._recording.program
    engine.take_spans()
    engine.record_spans(True)
    device.start(batch, rows).wait()
    engine.record_spans(False)
    ops: collections.Counter[str] = collections.Counter()
    for segment, _, begin, end in engine.take_spans().tolist():
        ops[program.segment_name(segment)] += (end - begin) / 1e6
    shown = {name: round(spent, 2) for name, spent in ops.most_common()}
    return {"best": round(min(times[2:]), 2), "median": round(statistics.median(times[2:]), 2), "ops": shown}


def main() -> int:
    """Measures each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device, vocab_size = load(options.model, options.dtype)
    report = {}
    for name, *shape in STEPS:
        report[name] = row = measure(device, *make_step(*shape, vocab_size), options.repeats)
        print(f"{name:<18}best {row['best']:>7}  median {row['median']:>7}  {row['ops']}", flush=True)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
