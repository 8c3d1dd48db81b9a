"""What the native engine notes, as events."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evensong.observe.chrome_trace import PartWriter
from evensong.worker import trace
from evensong.worker.trace import SAME_OP_NS, join_steps, join_units, write_native_trace

# segment, thread, begin, end
SPANS = np.array(
    [
        [0, 0, 1000, 2000],
        [0, 1, 1010, 1900],
        [0, 0, 2000 + SAME_OP_NS, 9000],
        [1, 0, 9100, 9200],
        [0, 1, 1901 + SAME_OP_NS, 8000],
        [0, 0, 20_000, 21_000],
        [2, 1, 21_000, 22_000],
    ]
)


def test_units_of_an_op_are_one_piece_unless_the_thread_waited() -> None:
    assert join_units(SPANS).tolist() == [
        [0, 0, 1000, 9000, 2],
        [1, 0, 9100, 9200, 1],
        [0, 0, 20_000, 21_000, 1],
        [0, 1, 1010, 1900, 1],
        [0, 1, 1901 + SAME_OP_NS, 8000, 1],
        [2, 1, 21_000, 22_000, 1],
    ]
    assert join_units(SPANS[:0]).shape == (0, 5)


def test_a_step_in_parts_is_one() -> None:
    steps = np.array([[-1, 10, 20, 1], [4, 30, 40, 9], [4, 41, 45, 2], [-1, 46, 47, 3], [5, 50, 60, 9]])
    assert join_steps(steps).tolist() == [[4, 30, 45, 9], [5, 50, 60, 9]]
    assert join_steps(steps[:1]).tolist() == [[0, 10, 20, 1]]
    assert join_steps(steps[:0]).shape == (0, 4)


def test_threads_are_rows_and_steps_are_one(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with PartWriter(path, 3, "worker-0.2") as writer:
        write_native_trace(writer, ["linear", "head", "sampling"], SPANS, np.array([[7, 900, 9300, 33]]))
    events = json.loads(f"[{path.read_text()}]")
    assert {event["pid"] for event in events} == {3}
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {0: "steps", 1: "thread 0", 2: "thread 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert spans[0] == {
        "ph": "X", "cat": "step", "name": "step 7", "pid": 3, "tid": 0, "ts": 0.9, "dur": 8.4,
        "args": {"step_id": 7, "num_tokens": 33},
    }  # fmt: skip
    assert spans[1] == {
        "ph": "X", "cat": "op", "name": "linear", "pid": 3, "tid": 1, "ts": 1.0, "dur": 8.0,
        "args": {"segment": 0, "units": 2},
    }  # fmt: skip
    assert len(spans) == 1 + 6 and not any(event["name"] == "process_labels" for event in events)


def test_units_are_joined_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "AT_ONCE", 2)
    spans = np.array([[0, 0, first, first + 10] for first in range(0, 50, 10)])
    with PartWriter(tmp_path / "part", 1, "worker-0.0") as writer:
        write_native_trace(writer, ["linear"], spans, np.zeros((0, 4), np.int64))
    events = [event for event in json.loads(f"[{(tmp_path / 'part').read_text()}]") if event["ph"] == "X"]
    assert [event["args"]["units"] for event in events] == [2, 2, 1]
    assert sum(event["dur"] for event in events) == pytest.approx(0.05)


def test_a_trace_that_is_cut_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_SPANS", len(SPANS))
    with PartWriter(tmp_path / "part", 1, "worker-0.0") as writer:
        write_native_trace(writer, ["a", "b", "c"], SPANS, np.zeros((0, 4), np.int64))
    assert '"labels":"ops cut off' in (tmp_path / "part").read_text()
