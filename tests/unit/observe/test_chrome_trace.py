"""Parts of a trace, and the one file that they become."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from evensong.observe.chrome_trace import PartWriter, merge_parts, rank_process, rank_title


def part(folder: Path, rank: int, num_spans: int) -> Path:
    path = folder / f"rank{rank}.part"
    with PartWriter(path, rank_process(rank), rank_title(rank)) as writer:
        for index in range(num_spans):
            writer.span("op", 'a "quoted"\nname', 1, 5_000_000_000_000_000 + index, 5_000_000_000_001_234 + index)
    return path


def test_parts_become_one_trace_of_one_event_a_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    parts = [part(tmp_path, 0, 2), part(tmp_path, 1, 0), part(tmp_path, 2, 1)]
    merge_parts(trace, parts)
    text = gzip.decompress(trace.read_bytes()).decode()
    events = json.loads(text)["traceEvents"]
    assert len(text.splitlines()) == len(events) + 2
    assert [event["pid"] for event in events if event["ph"] == "X"] == [1, 1, 3]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "worker-0.0", 2: "worker-0.1", 3: "worker-0.2"}
    assert all(path.exists() for path in parts)


def test_times_are_microseconds_to_the_nanosecond(tmp_path: Path) -> None:
    event = json.loads(f"[{part(tmp_path, 0, 2).read_text()}]")[-1]
    assert (event["ts"], event["dur"]) == (5_000_000_000_000.001, 1.234)
    assert event["name"] == 'a "quoted"\nname'


def test_a_trace_that_cannot_be_written_whole_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        merge_parts(tmp_path / "trace.json.gz", [part(tmp_path, 0, 1), tmp_path / "missing"])
    assert not (tmp_path / "trace.json.gz").exists()
