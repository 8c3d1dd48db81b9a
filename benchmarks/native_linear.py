"""Times of the native linear kernels: python benchmarks/native_linear.py [--isa I] [--dtype D] [--rows N ...]

All matrix products of one SmolLM2-135M step, on one thread and on two that take half of each matrix's outputs, beside
what memory and the inner loop allow in the same minute, and torch. Times are the best of several runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from evensong import _native

LAYERS = 30
# (rows, cols, epilogue): qkv, attention output, gate and up, down, output head
LAYER = ((960, 576, "store"), (576, 576, "add"), (3072, 576, "silu"), (576, 1536, "add"))
HEAD = (49152, 576, "argmax")
Products = list[tuple[np.ndarray, int, int, str]]


def make_products(isa: str, dtype: str) -> Products:
    """The step's packed weights, side by side in one piece of memory, as in a file."""
    shapes = [*LAYER * LAYERS, HEAD]
    sizes = [_native.packed_size(rows, cols, isa, dtype) for rows, cols, _ in shapes]
    memory = np.empty(sum(sizes), dtype=np.uint8)
    kind = np.uint16 if dtype == "bfloat16" else np.float32
    memory.view(kind)[:] = 0x3C21 if dtype == "bfloat16" else 0.01
    starts = np.cumsum([0, *sizes])
    return [
        (memory[start : start + size], *shape) for start, size, shape in zip(starts[:-1], sizes, shapes, strict=True)
    ]


def best_seconds(parts: list[Callable[[], object]], seconds: float = 0.6) -> float:
    """The shortest time in which all parts are done, the first in this thread, each other in one of its own."""
    best, end = float("inf"), time.perf_counter() + seconds
    with ThreadPoolExecutor(len(parts)) as pool:
        while time.perf_counter() < end:
            start = time.perf_counter()
            others = [pool.submit(part) for part in parts[1:]]
            parts[0]()
            for other in others:
                other.result()
            best = min(best, time.perf_counter() - start)
    return best


def torch_step(products: Products, num_rows: int) -> Callable[[], None]:
    """The same products by torch in bfloat16, without epilogues."""
    weights = [torch.full((rows, cols), 0.01, dtype=torch.bfloat16) for _, rows, cols, _ in products]
    inputs = {cols: torch.full((num_rows, cols), 0.01, dtype=torch.bfloat16) for _, _, cols, _ in products}

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default=_native.supported_isas()[0], choices=_native.supported_isas())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    args = parser.parse_args()
    products = make_products(args.isa, args.dtype)
    memory = np.concatenate([product[0] for product in products])
    multiplications = sum(rows * cols for _, rows, cols, _ in products)
    peak = _native.measure_gemm_peak(args.isa, args.dtype, 0.3)
    print(f"{args.isa} {args.dtype}: inner loop of one thread {peak / 1e9:.0f} GFLOP/s")
    for num_threads in (1, 2):
        halves = np.array_split(memory, num_threads)
        read = memory.nbytes / best_seconds([partial(_native.read_bytes, half, args.isa) for half in halves])
        print(f"{num_threads} threads: memory is read at {read / 1e9:.1f} GB/s")
        for num_rows in args.rows:
            run = partial(_native.run_linears, products, args.isa, args.dtype, num_rows)
            # Threads take their halves without waiting for each other: two steps at a time hide that they start apart.
            seconds = best_seconds([partial(run, part, num_threads, 2) for part in range(num_threads)]) / 2
            operations = 2 * num_rows * multiplications / seconds
            torch.set_num_threads(num_threads)
            theirs = best_seconds([torch_step(products, num_rows)])
            print(
                f"{num_rows:4} rows {seconds * 1e3:8.2f} ms {memory.nbytes / seconds / 1e9:6.1f} GB/s "
                f"({memory.nbytes / seconds / read:4.0%}) {operations / 1e9:6.0f} GFLOP/s "
                f"({operations / peak / num_threads:4.0%})   torch {theirs * 1e3:8.2f} ms"
            )


if __name__ == "__main__":
    main()
