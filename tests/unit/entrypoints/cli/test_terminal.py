"""chat and complete against a small server in a thread: streams, refusals, conversations, interrupts."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from evensong.entrypoints.cli import terminal
from evensong.entrypoints.cli.main import main


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers with what the test put into `answers`; notes what it was asked."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "m1"}]} if self.server.sane else [])  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))  # type: ignore[attr-defined]
        answer = self.server.answers.pop(0)  # type: ignore[attr-defined]
        if isinstance(answer, dict):
            self._send(400, answer)
            return
        self.send_response(200)
        self.end_headers()
        for piece in answer:
            delta = {"delta": {"content": piece}} if "chat" in self.path else {"text": piece}
            event = piece if isinstance(piece, dict) else {"choices": [delta]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, value: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned) as running:
        running.asked, running.answers, running.sane = [], [], True  # type: ignore[attr-defined]
        running.url = f"http://127.0.0.1:{running.server_port}/v1"  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_complete(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [["a", "b", "é"]]
    words = ["--prompt", "go", "--seed", "3", "--temperature", "0", "--max-tokens", "9", "--api-key", "k"]
    assert main(["complete", "--url", server.url + "/", *words]) == 0
    assert capsys.readouterr().out == "abé\n"
    path, body, key = server.asked[0]
    assert path == "/v1/completions" and key == "Bearer k"
    assert body == {"model": "m1", "stream": True, "seed": 3, "temperature": 0.0, "max_tokens": 9, "prompt": "go"}


def test_the_key_comes_from_the_environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSONG_API_KEY", "secret")
    server.answers = [["a"]]
    assert main(["complete", "--url", server.url, "--prompt", "go"]) == 0
    assert server.asked[0][2] == "Bearer secret"


def test_a_piped_chat_is_one_message(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    server.answers = [["fine"]]
    assert main(["chat", "--url", server.url, "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "fine\n"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two\nlines"}]
    assert server.asked[0][1]["messages"] == messages


class Typing(io.StringIO):
    """Standard input at a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_goes_on_after_a_refusal(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Typing("one\nbad\ntwo\n\nnever\n"))
    server.answers = [["1"], {"error": {"message": "too long"}}, ["2"]]
    assert main(["chat", "--url", server.url]) == 0
    output = capsys.readouterr()
    assert "answers 400: too long" in output.err
    last = server.asked[2][1]["messages"]
    assert [(m["role"], m["content"]) for m in last] == [("user", "one"), ("assistant", "1"), ("user", "two")]
    assert len(server.asked) == 3, "an empty line ends it"


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ({"error": {"message": "too long"}}, 2, "answers 400: too long"),
        ({"detail": "odd"}, 2, "odd"),
        (["a", {"error": {"message": "the engine died"}}], 1, "the engine died"),
    ],
)
def test_what_goes_wrong_is_one_line(
    server: Any, answer: Any, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [answer]
    assert main(["complete", "--url", server.url, "--prompt", "go"]) == code
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_something_else_answers(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.sane = False
    assert main(["complete", "--url", server.url, "--prompt", "go"]) == 1
    assert "no OpenAI-compatible server" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1"]) == 1
    said = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9/v1" in said and said.count("\n") == 1


def test_ctrl_c_ends_the_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    assert terminal.show(pieces()) == "half"
    assert capsys.readouterr().out == "half\n" and closed == [True]
