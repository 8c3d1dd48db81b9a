"""`evensong profile` with an engine of its own: the real demo model, in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evensong.entrypoints.cli import main as command
from evensong.observe.trace_figures import ranks_of, read_trace


def test_a_profile_of_its_own_engine(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "new" / "t.json.gz", tmp_path / "t.png"
    words = ["profile", str(demo_model), "--num-prompts", "4", "--input-len", "20", "--output-len", "24"]
    words += ["--output", str(trace), "--png", str(picture), "--log-level", "warning", "--max-model-len", "256"]
    assert command.main([*words, "--output-json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text()) == result
    assert [path.name for path in trace.parent.iterdir()] == ["t.json.gz"], "the parts and their folder are gone"
    assert picture.read_bytes().startswith(b"\x89PNG")
    (rank,) = result["ranks"]
    assert rank["name"] == "worker-0.0" and 0 < rank["busy"] <= 1 and rank["num_steps"] >= 24
    assert rank["ops"][0]["name"] in ("linear", "output_head") and rank["gap_us"]["median"] > 0
    assert set(result["core_us"]) == {"schedule", "execute", "update"}
    assert result["num_requests"] == 4 and "thread time by op" in out
    core, worker = read_trace(trace)
    assert core.title == "core-0" and ranks_of([core, worker]) == [worker]
    # The core's clock and the engine's are one: no op lies outside what the core has planned.
    assert core.own.begins.min() < worker.ops.begins.min() and worker.ops.ends.max() < core.own.ends.max()
    # Of 4 prompts and their 24 tokens, the last of which are never computed.
    assert sum(core.own.num_tokens[core.own.kinds == core.own.names.index("schedule")]) == 4 * (20 + 23)


def test_two_stages_stand_on_one_clock(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json.gz"
    words = ["profile", str(demo_model), "-pp", "2", "--num-prompts", "4", "--input-len", "20", "--output-len", "24"]
    words += ["--output", str(trace), "--log-level", "warning", "--max-model-len", "256"]
    assert command.main(words) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [rank["name"] for rank in result["ranks"]] == ["worker-0.0", "worker-0.1"]
    assert all(0 < rank["busy"] <= 1 for rank in result["ranks"])
    first, second = ranks_of(read_trace(trace))
    ids = first.steps.step_ids.tolist()
    assert len(ids) > 24 and ids == second.steps.step_ids.tolist() and ids == list(range(ids[0], ids[0] + len(ids)))
    # What a stage computes of a step comes before anything that the next one computes of it. A span of sending may end
    # after what was sent has arrived.
    computes = first.ops.kinds != first.ops.names.index("send")
    for index in range(len(ids)):
        ended = first.ops.ends[computes & (first.ops.begins < first.steps.ends[index])].max()
        inside = (second.ops.begins >= second.steps.begins[index]) & (second.ops.begins < second.steps.ends[index])
        layers = inside & (second.ops.kinds == second.ops.names.index("linear"))
        assert layers.any() and second.ops.begins[layers].min() >= ended
    assert {"embedding", "send"} <= set(first.ops.names) and "output_head" not in first.ops.names
    assert {"receive", "output_head", "sampling"} <= set(second.ops.names)
