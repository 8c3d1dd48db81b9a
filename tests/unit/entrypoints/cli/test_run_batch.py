"""run-batch: every line gets one answer or one error line, through the real application over a scripted core."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evensong.entrypoints.cli import main as command
from evensong.entrypoints.cli import run_batch
from evensong.entrypoints.cli.run_batch import BadLine, Batch, finished_lines, read_line
from evensong.protocol.errors import EngineDeadError
from tests.unit.entrypoints.http.serving import ANSWER, Served, TalkingClient
from tests.unit.entrypoints.http.serving import run as run_served

BAR = SimpleNamespace(update=lambda: None)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "hi", "max_tokens": 100, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def answer(path: Path, text: str, done: set[str] | None = None) -> tuple[list[dict[str, Any]], int]:
    """The output lines of an input text, and how many failed."""
    path.write_text(text)
    output = io.BytesIO()
    failed: list[int] = []

    async def body(served: Served) -> None:
        batch = Batch(served.http, output, done or set(), BAR)
        assert served.state.engine is not None
        await batch.run(path, 4, served.state.engine)
        failed.append(batch.num_failed)

    run_served(body)
    return [json.loads(raw) for raw in output.getvalue().decode().splitlines()], failed[0]


def test_lines_are_answered_as_the_server_does(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    lines = [line("a"), {**line("b"), "url": "/v1/chat/completions", "body": chat}]
    answers, failed = answer(tmp_path / "in", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert failed == 0 and len(answers) == 2
    first, second = sorted(answers, key=lambda a: str(a["custom_id"]))
    assert first["error"] is None and first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["text"] == ANSWER
    assert first["response"]["body"]["id"] == f"cmpl-{first['response']['request_id']}"
    assert [c["message"]["content"] for c in second["response"]["body"]["choices"]] == [ANSWER] * 2
    assert first["id"] != second["id"]


def test_the_run_goes_on_after_every_kind_of_bad_line(tmp_path: Path) -> None:
    bad = [
        "not json",
        "[]",
        '"text"',
        "[" * 100_000,
        '{"custom_id": "no-body", "method": "POST", "url": "/v1/completions"}',
        json.dumps(line("")),
        json.dumps({**line("get"), "method": "GET"}),
        json.dumps({**line("url"), "url": "http://elsewhere/v1/completions"}),
        json.dumps(line("stream", stream=True)),
        json.dumps(line("good")),
    ]
    answers, failed = answer(tmp_path / "in", "\n".join([json.dumps(line("good")), *bad]))
    assert len(answers) == len(bad) + 1 and failed == len(bad)
    errors = [a for a in answers if a["error"]]
    assert len(errors) == len(bad) and all(a["response"] is None for a in errors)
    assert {a["error"]["code"] for a in errors} == {"invalid_line"}
    assert {a["custom_id"] for a in errors} == {None, "no-body", "", "get", "url", "stream", "good"}
    assert all(a["error"]["message"].startswith("line ") for a in errors)


def test_what_the_server_refuses_is_a_response_with_its_status(tmp_path: Path) -> None:
    lines = [line("model", model="other"), line("n", n=10**6), line("huge", prompt=""), {**line("list"), "body": [1]}]
    answers, failed = answer(tmp_path / "in", "\n".join(map(json.dumps, lines)))
    assert failed == 4
    assert {a["custom_id"]: a["response"]["status_code"] for a in answers} == {
        "model": 404, "n": 400, "huge": 400, "list": 400,
    }  # fmt: skip
    assert all(a["error"] is None and a["response"]["body"]["error"]["message"] for a in answers)


def test_the_bodys_bytes_are_not_rewritten(tmp_path: Path) -> None:
    text = '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "prompt": "b"}}'
    (only,), failed = answer(tmp_path / "in", text)
    assert failed == 1 and "comes twice" in only["response"]["body"]["error"]["message"]


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(line(name)) for name in "abc")
    answers, _ = answer(tmp_path / "in", text, done={"a", "c"})
    assert [a["custom_id"] for a in answers] == ["b"]


def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_batch, "BUSY_SECONDS", 0.0)
    path = tmp_path / "in"
    path.write_text(json.dumps(line("a")))
    statuses = [429, 503, 200]  # fewer refusals than make it the request's own

    class Busy:
        async def post(self, url: str, **_: Any) -> Any:
            status = statuses.pop(0)
            return SimpleNamespace(status_code=status, headers={"X-Request-Id": "r"}, content=b'{"n":1}')

    output = io.BytesIO()
    engine: Any = SimpleNamespace(errored=False)
    http: Any = Busy()
    asyncio.run(Batch(http, output, set(), BAR).run(path, 2, engine))
    assert json.loads(output.getvalue())["response"] == {"status_code": 200, "request_id": "r", "body": {"n": 1}}
    assert not statuses


def test_a_refusal_that_is_not_from_load_is_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_batch, "BUSY_SECONDS", 0.001)
    path = tmp_path / "in"
    path.write_text("".join(json.dumps(line(name)) + "\n" for name in "ab"))

    class Full:
        async def post(self, url: str, **_: Any) -> Any:
            await asyncio.sleep(0)
            return SimpleNamespace(status_code=429, headers={}, content=b"{}")

    output = io.BytesIO()
    engine: Any = SimpleNamespace(errored=False)
    http: Any = Full()
    asyncio.run(asyncio.wait_for(Batch(http, output, set(), BAR).run(path, 2, engine), 20))
    answers = [json.loads(raw) for raw in output.getvalue().splitlines()]
    assert [a["response"]["status_code"] for a in answers] == [429, 429]


def test_a_dead_engine_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text("\n".join(json.dumps(line(str(i))) for i in range(50)))
    output = io.BytesIO()

    async def body(served: Served) -> None:
        assert served.state.engine is not None
        asyncio.get_running_loop().call_later(0.05, served.core.script.die)
        with pytest.raises(EngineDeadError):
            await Batch(served.http, output, set(), BAR).run(path, 2, served.state.engine)

    run_served(body, lambda: TalkingClient(hold_after=1))
    assert len(output.getvalue().splitlines()) <= 4


def test_only_whole_answers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    good = b'{"custom_id": "a", "response": {"status_code": 200}}\n'
    bad = b'{"custom_id": "b", "response": {"status_code": 400}}\n{"custom_id": "c", "response": null}\nx\n'
    path.write_bytes(good + bad + b'{"custom_id": "d", "response": {"status_code": 200}}')
    assert finished_lines(path) == {"a": good}
    assert finished_lines(tmp_path / "none") == {}


def test_lone_surrogates_in_an_id_are_a_bad_line() -> None:
    with pytest.raises(BadLine):
        read_line(json.dumps(line("\ud800")).encode())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-i", "http://x/in", "-o", "out"], "local files only"),
        (["-i", "/nowhere/in", "-o", "out"], "cannot be read"),
        (["-i", "IN", "-o", "IN"], "is the input file"),
        (["-i", "IN", "-o", "/nowhere/out"], "cannot be written"),
        (["-i", "IN", "-o", "out", "--block-size", "0"], "block_size"),
    ],
)
def test_files_that_cannot_be_used(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in"
    path.write_text(json.dumps(line("a")) + "\n")
    assert command.main(["run-batch", *[str(path) if word == "IN" else word for word in words]]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert path.read_text() == json.dumps(line("a")) + "\n"
