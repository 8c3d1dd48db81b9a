"""A profile of a running server: its control routes, and what they may refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evensong.entrypoints.cli import main as command
from tests.unit.entrypoints.cli.bench.scripted import KEY, Handler, ScriptedServer, scripted_server
from tests.unit.observe.test_trace_figures import make_trace


class Profiling(Handler):
    """The profiler's routes as well: `state` holds whether it runs, the trace, and what is refused."""

    state: dict[str, Any] = {}

    def do_POST(self) -> None:
        route = self.path.partition("?")[0]
        if route not in ("/start_profile", "/stop_profile"):
            super().do_POST()
        elif route == self.state.get("refused"):
            self._json(self.state["status"], {"error": {"message": "not now"}})
        elif self._allowed():
            self.state.setdefault("calls", []).append((route, len(self.server.bodies)))
            answer = {"status": "profiling"} if route == "/start_profile" else {"traces": [self.state["trace"]]}
            self._json(200, answer)


@pytest.fixture
def state(tmp_path: Path) -> dict[str, Any]:
    return {"trace": str(make_trace(tmp_path))}


@pytest.fixture
def server(state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    for name in ("EVENSONG_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Profiling, "state", state)
    with scripted_server() as running:
        running.RequestHandlerClass = Profiling
        yield running


def profile(server: ScriptedServer, *words: str) -> int:
    return command.main(["profile", "--url", server.url, "--num-prompts", "3", "--output-len", "20", *words])


def test_the_load_runs_between_start_and_stop(
    server: ScriptedServer, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(server) == 0
    assert state["calls"] == [("/start_profile", 3), ("/stop_profile", 6)]
    assert [body["max_tokens"] for body in server.bodies] == [8] * 3 + [20] * 3
    assert all(body["ignore_eos"] for body in server.bodies)
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["trace"] == state["trace"] and result["num_requests"] == 3
    assert [rank["busy"] for rank in result["ranks"]] == [0.8, 0.8]
    assert lines[-2] == f"trace: {state['trace']}" and any("worker-0.1" in line for line in lines)


def test_a_trace_on_another_machine_is_named(
    server: ScriptedServer, state: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state["trace"] = "/on/another/machine.gz"
    assert profile(server) == 0
    out, err = capsys.readouterr()
    assert "trace: /on/another/machine.gz" in out and "cannot be read here" in err
    assert json.loads(out.splitlines()[-1])["trace"] == "/on/another/machine.gz"
    assert profile(server, "--png", str(tmp_path / "t.png")) == 1, "the picture was asked for"


@pytest.mark.parametrize(
    ("refused", "status", "said"),
    [
        ("/start_profile", 409, "answers 409: not now"),
        ("/start_profile", 403, "answers 403: not now (--api-key, or set EVENSONG_API_KEY"),
        ("/stop_profile", 500, "answers 500: not now"),
    ],
)
def test_what_the_server_refuses(
    server: ScriptedServer,
    state: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    refused: str,
    status: int,
    said: str,
) -> None:
    state |= {"refused": refused, "status": status}
    assert profile(server) == 1
    err = capsys.readouterr().err
    assert f"{refused} {said}" in err and len(err.splitlines()) == 1


def test_a_key_is_sent(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = KEY
    assert profile(server) == 1
    assert "answers 401: a key is needed" in capsys.readouterr().err
    assert profile(server, "--api-key", KEY) == 0
    monkeypatch.setenv("EVENSONG_API_KEY", KEY)
    assert profile(server) == 0


def test_no_answer_is_a_failure_and_the_profiler_is_stopped(
    server: ScriptedServer, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail = dict.fromkeys(range(6), "400")
    assert profile(server) == 1
    assert "answered no request: 400: not like this" in capsys.readouterr().err
    assert [route for route, _ in state["calls"]] == ["/start_profile", "/stop_profile"]
