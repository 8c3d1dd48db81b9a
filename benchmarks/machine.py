"""What this machine can do right now: bytes read from memory and FLOP of matrix products, per second, on all cores.

    python benchmarks/machine.py

Measured with the engine's own kernels where they are built, else with numpy and torch, which then is said: torch's
products have overheads that the kernels have not, and a fraction of a low peak looks better than it is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from evensong.utils.machine import usable_cpus

try:
    from evensong import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

ARRAY_BYTES = 1 << 29  # far more than any cache keeps
READ_REPEATS = 6
GEMM_SECONDS = 0.4
GEMM_SIZE = 2048
DTYPES = {"bf16": "bfloat16", "f32": "float32"}


def together(calls: list[Callable[[], Any]]) -> tuple[float, list[Any]]:
    """Seconds from the first start of `calls`, a thread for each, to the last one's end; and what they returned."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> tuple[float, float, Any]:
        start.wait()
        # Taken by the thread itself: on a busy machine another one may be late to look at the clock.
        begun = time.perf_counter()
        result = call()
        return begun, time.perf_counter(), result

    with ThreadPoolExecutor(max_workers=len(calls)) as threads:
        done = list(threads.map(run, calls))
    return max(end for _, end, _ in done) - min(begun for begun, _, _ in done), [result for _, _, result in done]


class Machine:
    """Holds the array that is read, so that measuring again costs no page faults."""

    def __init__(self) -> None:
        self._threads = usable_cpus()
        self._array = np.ones(ARRAY_BYTES, dtype=np.uint8)
        isas = list(native.supported_isas()) if native is not None else []
        self.isa = isas[0] if isas else None
        self._reads = self.isa is not None and hasattr(native, "read_bytes")
        self._multiplies = self.isa is not None and hasattr(native, "measure_gemm_peak")

    def describe(self) -> dict[str, Any]:
        """What the figures are measured with."""
        return {
            "threads": self._threads,
            "isa": self.isa,
            "read_with": "native" if self._reads else "numpy",
            "gemm_with": "native" if self._multiplies else "torch",
        }

    def read_bandwidth(self) -> float:
        """Bytes per second of all threads together, each reading its own part: the best of some passes."""
        read = (lambda part: native.read_bytes(part, self.isa)) if self._reads else _read_with_numpy
        parts = np.split(self._array[: ARRAY_BYTES // (64 * self._threads) * (64 * self._threads)], self._threads)
        size = sum(part.nbytes for part in parts)
        return max(size / together([lambda p=part: read(p) for part in parts])[0] for _ in range(READ_REPEATS))

    def gemm_peak(self, dtype: str) -> float:
        """FLOP per second of all threads together, with inputs and weights of `dtype`: bfloat16 or float32."""
        if not self._multiplies:
            return _torch_gemm_peak(dtype, self._threads)
        one: Callable[[], float] = lambda: native.measure_gemm_peak(self.isa, dtype, GEMM_SECONDS)  # noqa: E731
        return float(sum(together([one] * self._threads)[1]))

    def measure(self) -> dict[str, float]:
        """GB/s and GFLOP/s, in about a second."""
        peaks = {f"{name}_gflops": round(self.gemm_peak(dtype) / 1e9, 1) for name, dtype in DTYPES.items()}
        return {"read_gb_per_s": round(self.read_bandwidth() / 1e9, 2)} | peaks


def _read_with_numpy(part: np.ndarray) -> int:
    # Of numpy's reductions this one is vectorised and comes closest to what memory gives.
    return int(part.view(np.int32).max())


def _torch_gemm_peak(dtype: str, threads: int) -> float:
    import torch  # noqa: PLC0415  only where there is nothing better

    torch.set_num_threads(threads)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(kind) for _ in range(2))
    torch.matmul(a, b)
    best, until = float("inf"), time.perf_counter() + GEMM_SECONDS
    while time.perf_counter() < until:
        begun = time.perf_counter()
        torch.matmul(a, b)
        best = min(best, time.perf_counter() - begun)
    return 2 * GEMM_SIZE**3 / best


def mean_of(*measured: dict[str, float]) -> dict[str, float]:
    """The mean of each figure."""
    return {name: round(sum(one[name] for one in measured) / len(measured), 2) for name in measured[0]}


def main() -> int:
    """Measures twice: how far the two differ says how quiet the machine is."""
    machine = Machine()
    report = {**machine.describe(), "measured": [machine.measure(), machine.measure()]}
    for name in report["measured"][0]:
        print(f"{name:<16}{' '.join(f'{one[name]:10}' for one in report['measured'])}")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
