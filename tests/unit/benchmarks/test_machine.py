"""How the benchmarks measure the machine: all threads at once, and every byte once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import machine


def test_together_times_from_the_first_start_to_the_last_end() -> None:
    seconds, results = machine.together([lambda: time.sleep(0.05) or 1, lambda: time.sleep(0.01) or 2])
    assert results == [1, 2]
    assert seconds >= 0.05


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        machine.together([lambda: 1 // 0, lambda: 1])


def test_the_kernels_are_used_where_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int, str]] = []

    def read_bytes(part: np.ndarray, isa: str) -> int:
        read.append((part.__array_interface__["data"][0], part.nbytes, isa))
        return 0

    native = SimpleNamespace(
        supported_isas=lambda: ["best", "other"],
        read_bytes=read_bytes,
        measure_gemm_peak=lambda isa, dtype, seconds: {"bfloat16": 4e9, "float32": 1e9}[dtype],
    )
    monkeypatch.setattr(machine, "native", native)
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 16)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setattr(machine, "READ_REPEATS", 1)
    measured = machine.Machine().measure()
    assert (measured["bf16_gflops"], measured["f32_gflops"]) == (8.0, 2.0)
    (first, size, isa), (second, _, _) = sorted(read)
    assert (second - first, size, isa) == (1 << 15, 1 << 15, "best")


def test_without_kernels_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "native", SimpleNamespace(supported_isas=lambda: ["best"]))
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 16)
    found = machine.Machine()
    assert (found.describe()["read_with"], found.describe()["gemm_with"]) == ("numpy", "torch")
    assert found.read_bandwidth() > 0


def test_mean_of_each_figure() -> None:
    assert machine.mean_of({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 4.0}) == {"a": 1.5, "b": 3.0}
