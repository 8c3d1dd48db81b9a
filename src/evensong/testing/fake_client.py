"""Clients without a core: tests say what the core sends, and see what it was sent."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Any

from evensong.engine.client.base import AsyncCoreClient, SyncCoreClient
from evensong.protocol.errors import EngineDeadError, RequestError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.testing.fake_executor import VOCAB_SIZE

Refuse = Callable[[EngineCoreRequest], RequestError | None]
Message = EngineCoreOutputs | Exception


def fake_resources(max_model_len: int = 4096) -> Resources:
    """What a core of a tiny model would learn."""
    return Resources(
        num_blocks=256,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        vocab_size=VOCAB_SIZE,
        kv_cache_bytes=1 << 20,
        fingerprint="fake",
        fingerprint_parts={},
    )


def tokens(
    request: EngineCoreRequest, start: int, ids: list[int], finish: FinishReason | None = None, **fields: Any
) -> EngineCoreOutput:
    """An output of a request: `ids` are its output tokens from index `start` on."""
    return EngineCoreOutput(request.request_id, request.attempt, start, ids, finish_reason=finish, **fields)


class Script:
    """What a fake core was sent. It answers an ADD at once: ADMITTED, or what `refuse` says."""

    def __init__(self, send: Callable[[Message], None], refuse: Refuse) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.dead: EngineDeadError | None = None
        self._send = send
        self._refuse = refuse

    def add(self, request: EngineCoreRequest) -> None:
        """Takes an ADD."""
        self.check()
        self.added.append(request)
        refusal = self._refuse(request)
        body = None if refusal is None else refusal.body()
        self._send(EngineCoreOutputs(admissions=[Admission(request.request_id, request.attempt, 0, body)]))

    def abort(self, request_ids: list[str]) -> None:
        """Takes an ABORT."""
        self.check()
        self.aborted += request_ids

    def call(self, verb: str, args: dict[str, Any]) -> Any:
        """Takes a utility call; an abort ends requests as a core does."""
        self.check()
        self.calls.append((verb, args))
        if verb == "abort_requests":
            ended = [request for request in self.added if request.request_id in args["request_ids"]]
            self._send(EngineCoreOutputs(outputs=[tokens(r, 0, [], FinishReason.ABORT) for r in ended]))
        return f"{verb} done"

    def die(self, reason: str = "killed") -> None:
        """The core is gone."""
        self.dead = EngineDeadError(reason)
        self._send(self.dead)

    def check(self) -> None:
        """Raises once the core is gone."""
        if self.dead is not None:
            raise self.dead


class FakeSyncClient(SyncCoreClient):
    """`get_output` gives what was sent, in order; with nothing there it fails instead of blocking."""

    def __init__(self, refuse: Refuse = lambda request: None, max_model_len: int = 4096) -> None:
        self._messages: collections.deque[Message] = collections.deque()
        self._resources = fake_resources(max_model_len)
        self.script = Script(self._messages.append, refuse)
        self.num_shutdowns = 0

    @property
    def resources(self) -> Resources:
        return self._resources

    def send(self, *outputs: EngineCoreOutput, **fields: Any) -> None:
        """A message of the core."""
        self._messages.append(EngineCoreOutputs(outputs=list(outputs), **fields))

    def add_request(self, request: EngineCoreRequest) -> None:
        self.script.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.script.abort(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        assert self._messages, "the test reads more than the core sends"
        message = self._messages.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        return self.script.call(verb, args)

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class FakeAsyncClient(AsyncCoreClient):
    """The same on an event loop; `get_output` waits for what is sent."""

    def __init__(self, refuse: Refuse = lambda request: None, max_model_len: int = 4096) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._resources = fake_resources(max_model_len)
        self.script = Script(self._messages.put_nowait, refuse)
        self.num_shutdowns = 0

    @property
    def resources(self) -> Resources:
        return self._resources

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self.script.dead

    def send(self, *outputs: EngineCoreOutput, **fields: Any) -> None:
        """A message of the core."""
        self._messages.put_nowait(EngineCoreOutputs(outputs=list(outputs), **fields))

    def fail(self, error: Exception) -> None:
        """The next read fails with `error`."""
        self._messages.put_nowait(error)

    async def add_request(self, request: EngineCoreRequest) -> None:
        self.script.add(request)
        await asyncio.sleep(0)

    async def abort_requests(self, request_ids: list[str]) -> None:
        self.script.abort(request_ids)

    async def get_output(self) -> EngineCoreOutputs:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        return self.script.call(verb, args)

    def shutdown(self) -> None:
        self.num_shutdowns += 1
