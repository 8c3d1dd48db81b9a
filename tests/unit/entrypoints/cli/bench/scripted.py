"""An OpenAI-compatible server whose answers are a script, in a thread of this process."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "right"


class ScriptedServer(ThreadingHTTPServer):
    """What it got, and how it answers: `fail` maps the number of a request to what goes wrong with it."""

    daemon_threads = True

    def __init__(self, *, key: str | None = None, tokenizer: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.key = key
        self.tokenizer = tokenizer
        self.fail: dict[int, str] = {}
        self.hold = threading.Event()
        self.lock = threading.Lock()
        self.starting = 0  # how many times it says yet that it is not ready
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """The routes that the benchmark asks."""

    server: ScriptedServer

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.server.starting:
            self.server.starting -= 1
            self._json(503, {"error": {"message": "starting"}})
        elif self.path == "/v1/models" and self._allowed():
            self._json(200, {"object": "list", "data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        if self.path == "/tokenize" and self.server.tokenizer:
            # A newline is a token; every word is one, but for long ones.
            words = body["prompt"].replace("\n", " | ").split()
            tokens = [hash(word) % 1000 for word in words for _ in range(1 + len(word) // 8)]
            self._json(200, {"tokens": tokens, "count": len(tokens)})
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            self._generate(body)
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def _generate(self, body: dict[str, Any]) -> None:
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
        how = self.server.fail.get(number)
        if how == "400":
            self._json(400, {"error": {"message": "not like this"}})
            return
        if how == "hold":
            self.server.hold.wait(20)
        chat = "messages" in body
        count = body["max_completion_tokens" if chat else "max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(count):
            if how == "error" and index == 2:
                self._event({"error": {"message": "the engine died"}})
            if how == "cut" and index == 2:
                return
            text = f"t{index} \u2028"
            self._event({"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b": ping\n\ndata: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def _allowed(self) -> bool:
        if self.server.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
            return True
        self._json(401, {"error": {"message": "a key is needed"}})
        return False

    def _json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def scripted_server(**options: Any) -> Iterator[ScriptedServer]:
    """A running one."""
    with ScriptedServer(**options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.hold.set()
            server.shutdown()
            thread.join()
