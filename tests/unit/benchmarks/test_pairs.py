"""What the benchmarks make of pairs that they measured."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.pairs import in_turns, latency_row, print_row, run_parts, stages_row, throughput_row


def test_sides_take_turns_with_the_same_prompts() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str) -> Any:
        def run(seed: int) -> float:
            calls.append((name, seed))
            return float(seed)

        return run

    assert in_turns({"a": side("a"), "b": side("b")}, 3) == {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0]}
    assert calls == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]


def test_ratios_are_pair_by_pair() -> None:
    row = throughput_row({"PP=1": [3.0, 4.0, 5.0], "PP=2": [2.0, 2.0, 4.0]}, 120, 1.5)
    assert row["sides"]["PP=1"] == {"median": 30.0, "min": 24.0, "max": 40.0}
    assert row["ratio"] == {"median": 1.5, "min": 1.25, "max": 2.0} and row["reached"]
    assert not throughput_row({"PP=1": [3.0], "PP=2": [2.01]}, 120, 1.5)["reached"]


@pytest.mark.parametrize(("two", "reached"), [(0.009, True), (0.010, False), (0.011, False)])
def test_latency_must_be_less(two: float, reached: bool) -> None:
    row = latency_row({"TP=1": [0.010], "TP=2": [two]})
    assert row["sides"]["TP=2"]["median"] == two * 1e3 and row["reached"] is reached


@pytest.mark.parametrize(
    ("idle", "reached"), [((0.1, 0.02), True), ((0.1, 0.11), False), ((0.05, None), False), ((), False)]
)
def test_every_stage_must_be_busy(idle: tuple[float | None, ...], reached: bool) -> None:
    ranks = [{"name": f"worker-0.{i}", "idle": share, "gap_us": None} for i, share in enumerate(idle)]
    row = stages_row({"ranks": ranks}, 0.1)
    assert row["reached"] is reached and list(row["idle"].values()) == list(idle)


def test_a_part_that_fails_does_not_cost_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise SystemExit("PP=2 ended early: no such flag")

    report = run_parts({"pp": broken, "tp": lambda: latency_row({"TP=1": [0.02], "TP=2": [0.01]})})
    assert report["pp"] == {"error": "PP=2 ended early: no such flag"} and report["tp"]["reached"]
    out = capsys.readouterr().out
    assert "pp: PP=2 ended early" in out and "ratio 2 (2-2), goal 1: reached" in out


def test_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [{"name": "worker-0.0", "idle": 0.25, "gap_us": None}, {"name": "worker-0.1", "idle": None, "gap_us": None}]
    print_row("stages", stages_row({"ranks": ranks}, 0.1))
    assert capsys.readouterr().out == "stages: idle worker-0.0 25.0%, worker-0.1 -; goal at most 10%: NOT reached\n"
