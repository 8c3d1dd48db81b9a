"""Figures of made-up ranks, whose busy and waiting times are known."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

from evensong.observe.chrome_trace import CORE, CORE_PROCESS, OP, PartWriter, merge_parts, rank_process, rank_title
from evensong.observe.trace_figures import (
    Process,
    TraceError,
    busy_ns,
    figures_of,
    gaps_ns,
    ranks_of,
    read_trace,
    steady_window,
    table_of,
)

US = 1000
# A step of 100 us: thread 0 multiplies for 60, then both share 20 of attention; 20 of nothing.
STEP_US, NUM_STEPS = 100, 10
OPS = (("linear", 1, 0, 60), ("attention", 1, 60, 80), ("attention", 2, 65, 80))


def write_rank(folder: Path, rank: int, shift_us: int = 0, ops: Sequence[tuple[str, int, int, int]] = OPS) -> Path:
    path = folder / f"{rank}.part"
    with PartWriter(path, rank_process(rank), rank_title(rank)) as writer:
        for number in range(NUM_STEPS):
            origin = number * STEP_US + shift_us
            # A stage's step begins with waiting.
            writer.step(40 + number, (origin - 5) * US, (origin + 80) * US, 32)
            for name, thread, begin, end in ops:
                writer.span(OP, name, thread, (origin + begin) * US, (origin + end) * US)
    return path


def make_trace(folder: Path, num_ranks: int = 2) -> Path:
    core, trace = folder / "core.part", folder / "trace.json.gz"
    with PartWriter(core, CORE_PROCESS, "core-0") as writer:
        for number in range(NUM_STEPS):
            writer.span(CORE, "schedule", 0, number * STEP_US * US, (number * STEP_US + 3) * US, '{"step_id":40}')
    merge_parts(trace, [core, *(write_rank(folder, rank, 50 * rank) for rank in range(num_ranks))])
    return trace


@pytest.fixture
def processes(tmp_path: Path) -> list[Process]:
    return read_trace(make_trace(tmp_path))


def test_what_is_read(processes: list[Process]) -> None:
    assert [process.title for process in processes] == ["core-0", "worker-0.0", "worker-0.1"]
    core, first, second = processes
    assert ranks_of(processes) == [first, second]
    assert (len(core.own), len(core.ops), len(first.steps), len(first.ops)) == (10, 0, 10, 30)
    assert first.steps.step_ids.tolist() == list(range(40, 50)) and first.steps.num_tokens.tolist() == [32] * 10
    assert (second.ops.begins - first.ops.begins == 50 * US).all()


def test_busy_is_the_union_of_ops_in_the_steady_state(processes: list[Process]) -> None:
    first = processes[1]
    window = steady_window(first)
    # One step of ten is cut off at each end.
    assert window == (100 * US, 900 * US)
    assert busy_ns(first.ops, *window) == 8 * 80 * US
    assert busy_ns(first.ops, 70 * US, 130 * US) == 40 * US
    assert busy_ns(first.ops, 81 * US, 99 * US) == 0
    for rank in figures_of(processes)["ranks"]:
        assert (rank["busy"], rank["idle"], rank["window_ms"]) == (0.8, 0.2, 0.8)


def test_idle_between_steps_is_from_op_to_op(processes: list[Process]) -> None:
    first = processes[1]
    assert gaps_ns(first, 100 * US, 900 * US).tolist() == [20 * US] * 8
    rank = figures_of(processes)["ranks"][1]
    assert rank["gap_us"] == {"median": 20.0, "p90": 20.0, "max": 20.0}
    assert rank["step_ms"] == {"median": 0.08, "p90": 0.08, "max": 0.08}


def test_time_by_op_is_that_of_threads(processes: list[Process]) -> None:
    ops = figures_of(processes)["ranks"][0]["ops"]
    assert ops == [{"name": "linear", "ms": 0.48, "share": 0.6316}, {"name": "attention", "ms": 0.28, "share": 0.3684}]
    assert figures_of(processes)["core_us"] == {"schedule": {"median": 3.0, "p90": 3.0, "max": 3.0}}


def test_an_op_within_another_counts_once(tmp_path: Path) -> None:
    nested = (("outer", 1, 0, 60), ("inner", 1, 0, 60), ("inner", 1, 10, 20), ("other", 1, 60, 70))
    merge_parts(tmp_path / "t.gz", [write_rank(tmp_path, 0, ops=nested)])
    ops = figures_of(read_trace(tmp_path / "t.gz"))["ranks"][0]["ops"]
    assert [(op["name"], op["ms"]) for op in ops] == [("outer", 0.48), ("other", 0.08)]


def test_too_few_steps_have_no_steady_state(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "part", 1, "worker-0.0") as writer:
        writer.label("ops cut off")
        for number in range(2):
            writer.step(number, number * 1000, number * 1000 + 900, 1)
            writer.span(OP, "linear", 1, number * 1000, number * 1000 + 900)
    merge_parts(tmp_path / "t.gz", [tmp_path / "part"])
    figures = figures_of(read_trace(tmp_path / "t.gz"))
    assert figures["ranks"][0]["busy"] is None and figures["ranks"][0]["ops"] == []
    table = table_of(figures)
    assert "too few steps" in table and "worker-0.0: ops cut off" in table


def test_the_table_names_ranks_and_ops(processes: list[Process]) -> None:
    table = table_of(figures_of(processes))
    for words in ("worker-0.0", "worker-0.1", "80.0%", "linear", "63.2%", "schedule"):
        assert words in table


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"{}\n"), gzip.compress(b'{"ph": 3}\n')])
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.gz").write_bytes(content)
    with pytest.raises(TraceError, match="holds no trace"):
        read_trace(tmp_path / "t.gz")


def test_a_trace_that_ends_early(tmp_path: Path) -> None:
    path = make_trace(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError):
        read_trace(path)
