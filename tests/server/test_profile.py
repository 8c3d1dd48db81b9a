"""Profiling a running server with the demo model, by its control routes and by `evensong profile --url`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evensong.entrypoints.cli import main as command
from evensong.observe.trace_figures import read_trace
from tests.server.harness import KNOWN, Server

KEY = "profile-key"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server_flags(traces: Path) -> list[str]:
    return ["--api-key", KEY, "--torch-profiler-dir", str(traces / "new"), "--served-model-name", "demo"]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVENSONG_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def profile(server: Server, *words: str) -> int:
    return command.main(["profile", "--url", server.url, "--num-prompts", "2", "--output-len", "12", *words])


def test_one_trace_lies_in_the_servers_folder(server: Server, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.client.post("/v1/completions", json=KNOWN, headers=AUTH).json()["choices"][0]["text"]
    assert profile(server, "--api-key", KEY) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (trace,) = (traces / "new").iterdir()
    assert result["trace"] == str(trace) and trace.name.startswith("profile.")
    assert [process.title for process in read_trace(trace)] == ["core-0", "worker-0.0"]
    assert 0 < result["ranks"][0]["busy"] <= 1 and result["num_requests"] == 2
    after = server.client.post("/v1/completions", json=KNOWN, headers=AUTH).json()["choices"][0]["text"]
    assert after == before


def test_what_is_refused_is_one_line(server: Server, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.client.post("/start_profile").status_code == 401
    assert profile(server) == 1
    assert "answers 401" in capsys.readouterr().err
    assert server.client.post("/stop_profile", headers=AUTH).status_code == 409
    for prefix in ("../up", "a" * 65):
        refused = server.client.post("/start_profile", params={"profile_prefix": prefix}, headers=AUTH)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "profile_prefix"
    kept = sorted(traces.rglob("*"))
    assert server.client.post("/start_profile", headers=AUTH).status_code == 200
    assert profile(server, "--api-key", KEY) == 1
    err = capsys.readouterr().err
    assert "the profiler runs already" in err and len(err.splitlines()) == 1
    # The one that ran was not ended by the one that came too late.
    (trace,) = server.client.post("/stop_profile", headers=AUTH).json()["traces"]
    assert sorted(traces.rglob("*")) == sorted([*kept, Path(trace)])


def test_a_trace_that_cannot_be_written_is_said_and_the_server_lives(server: Server, traces: Path) -> None:
    assert server.client.post("/start_profile", headers=AUTH).status_code == 200
    (traces / "new").rename(traces / "elsewhere")
    try:
        answer = server.client.post("/stop_profile", headers=AUTH)
        assert answer.status_code == 409 and "cannot be written" in answer.json()["error"]["message"]
    finally:
        (traces / "elsewhere").rename(traces / "new")
    assert server.client.post("/v1/completions", json=KNOWN, headers=AUTH).status_code == 200
    assert server.client.post("/start_profile", headers=AUTH).status_code == 200
    assert len(server.client.post("/stop_profile", headers=AUTH).json()["traces"]) == 1
