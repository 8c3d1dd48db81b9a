"""Torch's profiler as a part of a trace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evensong.observe.chrome_trace import PartWriter
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.tiny_models import write_tiny_llama
from evensong.worker import torch_trace
from evensong.worker.torch_device import TorchDevice
from evensong.worker.torch_trace import TorchTrace, write_torch_events
from tests.unit.worker.worlds import Job, World, make_worker


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(f"[{path.read_text()}]")
    return events


def test_torch_ops_lie_within_their_step_on_the_monotonic_clock(tmp_path: Path) -> None:
    trace, a = TorchTrace(), torch.ones(8, 8)
    trace.step_begins(16, 3)  # nobody listens
    trace.step_ends()
    trace.start("cpu")
    begin = time.monotonic_ns()
    trace.step_begins(17, 5)
    torch.matmul(a, a)
    trace.step_ends()
    end = time.monotonic_ns()
    with PartWriter(tmp_path / "part", 2, "worker-0.1") as writer:
        trace.stop(writer)
    events = events_of(tmp_path / "part")
    (step,) = [event for event in events if event.get("cat") == "step"]
    assert step["args"] == {"step_id": 17, "num_tokens": 5}
    assert begin / 1e3 <= step["ts"] + 1e-3 and step["ts"] + step["dur"] <= end / 1e3 + 1e-3
    (op,) = [event for event in events if event["name"] == "aten::mm"]
    # Torch's clock is calibrated now and then: a millisecond of difference shows that it is the same one.
    assert step["ts"] - 1000 <= op["ts"] <= op["ts"] + op["dur"] <= step["ts"] + step["dur"] + 1000
    assert {event["pid"] for event in events} == {2} and op["tid"] != step["tid"]


def test_it_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_trace, "MOST_STEPS", 2)
    trace = TorchTrace()
    trace.start("cpu")
    for step_id in (-1, 0, 1, 2):
        trace.step_begins(step_id, 1)
        torch.zeros(3).exp()
        trace.step_ends()
    with PartWriter(tmp_path / "part", 1, "worker-0.0") as writer:
        trace.stop(writer)
    events = events_of(tmp_path / "part")
    assert sum(event.get("cat") == "step" for event in events) == 2
    assert sum(event["name"] == "aten::exp" for event in events) == 3, "a probe and two steps"
    assert any(event["name"] == "process_labels" for event in events)


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
def test_flows_and_streams_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(torch_trace, "_CHUNK", chunk)
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm [x, y]", "pid": 0, "tid": 7, "ts": 20.5, "dur": 1.5}
    flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 99, "tid": 99, "id": 5, "ts": 20.0}
    other = {"ph": "X", "cat": "Trace", "name": "whole", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9}
    text = json.dumps({"baseTimeNanoseconds": 9_000_000, "traceEvents": [kernel, flow, other], "z": "]"}, indent=1)
    (tmp_path / "torch.json").write_text(text)
    with PartWriter(tmp_path / "part", 2, "worker-0.1") as writer:
        write_torch_events(writer, tmp_path / "torch.json", 4_000_000)
    events = events_of(tmp_path / "part")
    assert [event for event in events if event["ph"] != "M"] == [
        {**kernel, "pid": 2, "tid": 1, "ts": 5020.5},
        {**flow, "pid": 2, "tid": 2, "ts": 5020.0, "id": "2:5"},
    ]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "device 0 stream 7", 2: "torch thread 99"}


def test_a_torch_device_traces_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evensong.worker.worker.make_device", TorchDevice)
    worker = make_worker(write_tiny_llama(tmp_path / "model"), torch_profiler_dir=str(tmp_path / "traces"))
    part = Path(worker.profile("start") or "")
    World(worker).run([Job("a", [3, 4, 5], SamplingParams(seed=1))], 2)
    worker.profile("stop")
    steps = [event for event in events_of(part) if event.get("cat") == "step"]
    assert [step["args"]["num_tokens"] for step in steps] == [3, 1]
    ops = [event for event in events_of(part) if event.get("cat") == "cpu_op"]
    for step in steps:
        assert any(step["ts"] <= op["ts"] and op["ts"] + op["dur"] <= step["ts"] + step["dur"] for op in ops)
