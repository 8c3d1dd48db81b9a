"""The ring's benchmark counts what it says."""

from __future__ import annotations

from benchmarks.ring import measure


def test_every_round_comes_back() -> None:
    figures = measure(num_requests=4, num_ranks=2, rounds=200)
    assert 0 < figures["median_us"] <= figures["p90_us"] <= figures["p99_us"]  # type: ignore[operator]
    assert len(figures["resident_bytes"]) == 3  # type: ignore[arg-type]
