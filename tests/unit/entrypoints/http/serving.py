"""The real application and the real AsyncLLM over a client whose core is a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evensong.config.resolve import resolve
from evensong.config.sections import ServerConfig
from evensong.engine.async_llm import AsyncLLM
from evensong.engine.frontend.front import ModelFiles
from evensong.entrypoints.http.app import create_app
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.streaming import BODY_WRITER
from evensong.protocol.output import FinishReason, PromptScores, TokenLogprobs
from evensong.protocol.request import EngineCoreRequest
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, byte_ids, byte_tokenizer, tiny_description
from evensong.testing.fake_client import FakeAsyncClient, tokens
from evensong.utils.progress import ProgressPage

ANSWER = "Grüße, 世界! 👋"


class TalkingClient(FakeAsyncClient):
    """Answers every request with `answer`, one token a message, then EOS; stops after `hold_after` tokens if given."""

    def __init__(self, hold_after: int | None = None, answer: str | list[int] = ANSWER, **options: Any) -> None:
        super().__init__(**options)
        self.hold_after = hold_after
        self.answer = answer
        self.worst_logprob = -2.5
        self._talks: list[asyncio.Task[None]] = []

    async def add_request(self, request: EngineCoreRequest) -> None:
        await super().add_request(request)
        self._talks.append(asyncio.create_task(self._talk(request)))

    async def _talk(self, request: EngineCoreRequest) -> None:
        ids = [*(byte_ids(self.answer) if isinstance(self.answer, str) else self.answer), EOS_TOKEN_ID]
        most = request.params.max_tokens or len(ids)
        await self._score_prompt(request)
        if request.params.max_tokens == 0:
            self.send(tokens(request, 0, [], FinishReason.LENGTH))
            return
        for index, token_id in enumerate(ids):
            if index == self.hold_after or request.request_id in self.script.aborted:
                return
            finish = FinishReason.STOP if token_id == EOS_TOKEN_ID else None
            if index + 1 == most:
                finish = finish or FinishReason.LENGTH
            self.send(tokens(request, index, [token_id], finish, new_logprobs=self._logprobs(request, token_id)))
            if finish is not None:
                return
            await asyncio.sleep(0)

    async def _score_prompt(self, request: EngineCoreRequest) -> None:
        """The prompt's log-probabilities, two tokens a message: each at rank 4, after its successors."""
        count = request.params.prompt_logprobs
        if count is None:
            return
        ids = request.prompt_token_ids
        for start in range(1, len(ids), 2):
            positions = [
                TokenLogprobs([i, *range(i + 1, i + 1 + count)], [-9.0, *(-1.0 - k for k in range(count))], 4)
                for i in ids[start : start + 2]
            ]
            self.send(tokens(request, 0, [], prompt_scores=PromptScores(start, positions)))
            await asyncio.sleep(0)

    def _logprobs(self, request: EngineCoreRequest, token_id: int) -> list[TokenLogprobs] | None:
        if request.params.logprobs is None:
            return None
        best = [token_id, token_id + 1, token_id + 2][: request.params.logprobs]
        values = [-0.5, -1.5, self.worst_logprob][: request.params.logprobs]
        return [TokenLogprobs([token_id, *best], [-0.5, *values], 1)]


@dataclass
class Served:
    """An application under test."""

    app: FastAPI
    state: ServerState
    core: TalkingClient
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """A POST of a JSON body."""
        content = json.dumps(body).encode()
        return await self.http.post(path, content=content, headers={"Content-Type": "application/json"})

    async def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = await self.post("/v1/completions", **{"prompt": "hi", "max_tokens": 100, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def chat(self, **body: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        answer = await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end as it should."""
        answer = await self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Writer:
    """A connection's BodyWriter: parts lie here until the application sends something. `room`: writes that it takes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room: int | None = None
        self._drained = asyncio.Event()
        self._drained.set()

    def write(self, body: bytes) -> bool:
        """Takes a part, while there is room."""
        if self.room == 0:
            self._drained.clear()
            return False
        self.room = None if self.room is None else self.room - 1
        self.parts.append(body)
        return True

    def make_room(self, room: int | None) -> None:
        """The client has read."""
        self.room = room
        self._drained.set()

    async def drain(self) -> None:
        """Until there is room."""
        await self._drained.wait()


def pushing(app: FastAPI, writer: Callable[[], Writer] = Writer) -> ASGIApp:
    """The application as it is on connections that have a BodyWriter."""

    async def pushed(scope: Scope, receive: Receive, send: Send) -> None:
        own = writer()

        async def send_in_order(message: Message) -> None:
            if message["type"] == "http.response.body" and own.parts:
                body = b"".join(own.parts)
                own.parts.clear()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send(message)

        await app({**scope, "extensions": {BODY_WRITER: own}}, receive, send_in_order)

    return pushed


@contextlib.asynccontextmanager
async def serving(
    core: TalkingClient | None = None,
    engine: dict[str, Any] | None = None,
    client: tuple[str, int] = ("127.0.0.1", 123),
    pushed: bool = True,
    **server: Any,
) -> AsyncIterator[Served]:
    """An application that is ready; with `pushed` its streams are, where they can be."""
    core = core or TalkingClient()
    config = resolve({"served_model_name": "demo", **(engine or {})})
    state = ServerState(config, ServerConfig(**server), ProgressPage())
    state.phase = ""
    files = ModelFiles(byte_tokenizer(), tiny_description())
    running = AsyncLLM(state.engine_config, client=core, files=files, max_n=state.server_config.max_n)
    state.engine = running
    app = create_app(state)
    transport = httpx.ASGITransport(pushing(app) if pushed else app, client=client)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        try:
            yield Served(app, state, core, http)
        finally:
            running.shutdown()
            await asyncio.sleep(0)


def run(body: Callable[[Served], Awaitable[None]], core: Callable[[], TalkingClient] = TalkingClient, **o: Any) -> None:
    """Runs a test on an application of its own, with a limit."""

    async def main() -> None:
        async with serving(core(), **o) as served:
            await asyncio.wait_for(body(served), 20)

    asyncio.run(main())


async def settle() -> None:
    """Lets everything that can run do so."""
    for _ in range(100):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Waits for what threads bring about too; at most ten seconds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


class Visitor:
    """A client at the ASGI level, that can leave in the middle."""

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        self.messages: list[Any] = []
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Closes the connection."""
        self._gone.set()

    @property
    def statuses(self) -> list[int]:
        """The status lines that came; one at most."""
        return [message["status"] for message in self.messages if message["type"] == "http.response.start"]

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        await asyncio.sleep(0)
