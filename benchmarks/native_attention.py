"""Times of the attention kernels alone, on one thread: python benchmarks/native_attention.py [--isa I] [--repeats N]

Shapes of SmolLM2-135M. A table, then one JSON line. Times are processor time, the best of several runs in microseconds:
on a shared machine the least disturbed run says most about the code. Decoding comes with all sequences reading the same
blocks ("hot": in the processor's cache) and with caches of many layers in turn, as a step of a whole model sees them.
"reading" is what one thread reads from memory, the bound of the latter.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from evensong import _native

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 9, 3, 64, 16, 30
ROW = 2 * KV_HEADS * HEAD_DIM


def bits(array: np.ndarray[Any, Any], narrow: bool) -> np.ndarray[Any, Any]:
    """float32 as it is, or cut to bfloat16."""
    return (array.view(np.uint32) >> 16).astype(np.uint16) if narrow else array


def aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """On a cache line, as the engine's caches are."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def measure(
    isa: str, contexts: list[tuple[int, int]], layers: int, repeats: int, query_block: int, same: bool = False
) -> dict[str, float]:
    """Sequences of (keys before, new queries): microseconds of a call for one span and kv head, and its rates.

    same: all of them read the same blocks, so that these stay in the processor's cache.
    """
    narrow = isa == "avx512_bf16"
    rng = np.random.default_rng(0)
    spans, row, block = [], 0, 0
    flops = 0.0
    for before, new in contexts:
        count = -(-(before + new) // BLOCK_SIZE)
        table = np.arange(0 if same else block, count if same else block + count, dtype=np.int32)
        block = count if same else block + count
        for first in range(0, new, query_block):
            size = min(query_block, new - first)
            spans.append((row + first, size, before + first, table))
        row += new
        flops += sum(before + i + 1 for i in range(new)) * HEADS * HEAD_DIM * 4
    query = bits(rng.standard_normal((row, HEADS * HEAD_DIM), np.float32), narrow)
    one = bits(rng.standard_normal((block * BLOCK_SIZE, ROW), np.float32), narrow)
    caches = [aligned_copy(one) for _ in range(layers)]

    def run(cache: np.ndarray[Any, Any]) -> None:
        _native.attention(query, cache, spans, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEAD_DIM**-0.5, isa)

    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for cache in caches:
            run(cache)
        best = min(best, time.thread_time() - start)
    best /= layers
    read = sum(before + new for before, new in contexts) * ROW * one.itemsize
    return {
        "call_us": best / len(spans) / KV_HEADS * 1e6,
        "total_us": best * 1e6,
        "gflops": flops / best / 1e9,
        "gbs": read / best / 1e9,
    }


def reading_speed() -> float:
    """GB/s of a thread that reads memory which it has not touched for a while."""
    array = np.ones(8_000_000, np.int64)
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        array.max()
        best = min(best, time.thread_time() - start)
    return array.nbytes / best / 1e9


def main() -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default=_native.supported_isas()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--query-block", type=int, default=32)
    options = parser.parse_args()
    shapes = {
        "prompt 512": ([(0, 512)], 1, False),
        "prompt 2048": ([(0, 2048)], 1, False),
        "decode @ 4096, hot": ([(4095, 1)] * 8, 1, True),
        "decode 8 @ 4096": ([(4095, 1)] * 8, 6, False),
        "decode @ 200, hot": ([(199, 1)] * 64, 1, True),
        "decode 64 @ 200": ([(199, 1)] * 64, LAYERS, False),
    }
    results = {}
    print(f"{options.isa:20} {'call us':>9} {'total us':>10} {'GFLOP/s':>9} {'GB/s':>7}")
    for name, (contexts, layers, same) in shapes.items():
        repeats = max(5, options.repeats // layers)
        result = measure(options.isa, contexts, layers, repeats, options.query_block, same)
        results[name] = result
        print("{:20} {call_us:9.2f} {total_us:10.1f} {gflops:9.1f} {gbs:7.2f}".format(name, **result))
    print(f"reading: {reading_speed():.2f} GB/s")
    print(json.dumps({"isa": options.isa, "results": results}))


if __name__ == "__main__":
    main()
