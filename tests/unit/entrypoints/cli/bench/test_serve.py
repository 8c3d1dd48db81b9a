"""`evensong bench serve` against a scripted server: figures, failures that are counted, mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evensong.entrypoints.cli import main as command
from tests.unit.entrypoints.cli.bench.scripted import KEY, ScriptedServer, scripted_server


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVENSONG_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def bench(url: str, *words: str) -> int:
    return command.main(["bench", "serve", "--base-url", url, *words])


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_every_request_is_sent_and_counted(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "5", "--input-len", "9", "--output-len", "4", "--ignore-eos", "--temperature", "0.5"]
    assert bench(server.url, *words, "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9") == 0
    result = last_line(capsys)
    assert (result["completed"], result["failed"], result["unfinished"], result["first_error"]) == (5, 0, 0, None)
    assert (result["total_output_tokens"], result["total_input_tokens"], result["model_id"]) == (20, 35, "m")
    assert 0 < result["p50_ttft_ms"] <= result["p99.9_ttft_ms"] <= result["p99.9_e2el_ms"]
    assert "mean_itl_ms" not in result and result["request_goodput"] is None
    body = server.bodies[0]
    assert len(body["prompt"]) == 9 and all(isinstance(token, int) for token in body["prompt"])
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (4, True, 0.5, True)
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 5


def test_chat_prompts_are_words_and_the_opening_chunk_is_no_token(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = str(tmp_path / "results")
    words = ["--num-prompts", "1", "--input-len", "6", "--output-len", "3", "--backend", "openai-chat"]
    words += ["--save-result", "--save-detailed", "--result-dir", name, "--result-filename", "r.json"]
    assert bench(f"{server.url}/v1", *words, "--metadata", "machine=mine") == 0
    saved = json.loads((tmp_path / "results" / "r.json").read_text())
    assert len(saved["itls"][0]) == 2 and saved["machine"] == "mine"
    assert saved["generated_texts"] == ["t0 \u2028t1 \u2028t2 \u2028"]
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 6
    shown = last_line(capsys)
    assert shown.items() <= saved.items() and "itls" not in shown


def test_failures_are_counted_and_the_first_is_shown(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail = {1: "400", 2: "error", 3: "cut"}
    words = ["--num-prompts", "5", "--input-len", "3", "--output-len", "4", "--max-concurrency", "1"]
    assert bench(server.url, *words, "--percentile-metrics", "client_queue_time") == 0
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert (result["completed"], result["failed"]) == (2, 3)
    assert result["first_error"] == "400: not like this" and "first error: 400: not like this" in output
    assert result["total_output_tokens"] == 8 and result["mean_client_queue_time_ms"] > 0


def test_no_answer_at_all_is_exit_code_1(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = {0: "400", 1: "error"}
    assert bench(server.url, "--num-prompts", "2", "--input-len", "3", "--max-concurrency", "1") == 1
    result = last_line(capsys)
    assert (result["completed"], result["mean_ttft_ms"]) == (0, None)


def test_ctrl_c_shows_what_there_is(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = {3: "hold"}

    def interrupt() -> None:
        until = time.monotonic() + 20
        while len(server.bodies) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    words = ["--num-prompts", "6", "--input-len", "3", "--output-len", "2", "--max-concurrency", "1"]
    assert bench(server.url, *words) == 130
    thread.join()
    result = last_line(capsys)
    assert (result["completed"], result["failed"], result["unfinished"]) == (3, 0, 3)


def test_a_trace_leaves_at_its_times(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 32, "output_length": 2, "hash_ids": [7, 8]},
        {"timestamp": 2000, "input_length": 40, "output_length": 3, "hash_ids": [7, 9, 10]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset-name", "trace", "--dataset-path", str(trace), "--time-scale", "0.2"]
    assert bench(server.url, *words) == 0
    result = last_line(capsys)
    assert result["completed"] == result["num_prompts"] == 2 and result["duration"] >= 0.2
    first, second = (body["prompt"] for body in server.bodies)
    assert (len(first), len(second)) == (32, 40) and first[:16] == second[:16] and first[16:] != second[16:32]
    assert [body["max_tokens"] for body in server.bodies] == [2, 3]


def test_a_server_that_starts_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server() as server:
        server.starting = 2
        words = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1"]
        assert bench(server.url, *words, "--ready-check-timeout-sec", "20") == 0
        assert server.starting == 0
        server.starting = 1
        assert bench(server.url, *words, "--model", "m") == 1
        assert "answers 503: starting" in capsys.readouterr().err


def test_a_server_without_a_tokenizer_gets_words(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(tokenizer=False) as server:
        assert bench(server.url, "--num-prompts", "1", "--input-len", "12", "--output-len", "1") == 0
        assert len(server.bodies[0]["prompt"].split()) == 12


def test_the_key_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(key=KEY) as server:
        words = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1"]
        assert bench(server.url, *words) == 1
        error = capsys.readouterr().err
        assert "answers 401: a key is needed" in error and "OPENAI_API_KEY" in error and error.count("\n") == 1
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert bench(server.url, *words) == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--model", "other"], 1, "the model 'other' is not served by"),
        (["--base-url", "http://127.0.0.1:1"], 1, "no server answers at http://127.0.0.1:1"),
        (["--base-url", "nonsense"], 1, "no server answers at nonsense"),
        (["--request-rate", "0"], 2, "--request-rate"),
        (["--request-rate", "nan"], 2, "--request-rate"),
        (["--max-concurrency", "0"], 2, "--max-concurrency"),
        (["--num-prompts", "0"], 2, "--num-prompts"),
        (["--random-range-ratio", "1"], 2, "--random-range-ratio"),
        (["--goodput", "ttft=3"], 2, "not METRIC:MILLISECONDS"),
        (["--goodput", "itl:3"], 2, "is not one of ttft, tpot, e2el"),
        (["--percentile-metrics", "speed"], 2, "'speed' is not one of"),
        (["--metric-percentiles", "101"], 2, "must be in 0..100"),
        (["--dataset-name", "trace"], 2, "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], 2, "cannot be read"),
        (["--self-timed"], 2, "needs a trace"),
        (["--header", "nothing"], 2, "is not KEY=VALUE"),
        (["--extra-body", "[]"], 2, "must be a JSON object"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], code: int, says: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server.url, *words) == code
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not server.bodies


def test_a_plot_is_drawn(server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "run.png"
    assert bench(server.url, "--num-prompts", "3", "--input-len", "3", "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert last_line(capsys)["completed"] == 3


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench(server.url, "--plot", "run.png") == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err and not server.bodies
