"""Server-sent events of a job. Where the server lets it, they are written in the moment in which the outputs are read.

An event that waits for a task to wake up, and then for every layer between that task and the socket, costs twice what
making it does. So the events of a completion or a chat go from the output processor straight to the socket, as long as
the client keeps up; what a slow client has not taken is merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from evensong.engine.async_llm import RequestStream
from evensong.entrypoints.http.errors import of_exception
from evensong.entrypoints.http.forms_out import encode
from evensong.entrypoints.http.generation import Job, merged
from evensong.entrypoints.http.service import within_time
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import EvensongError
from evensong.protocol.request_output import RequestOutput
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

# The ASGI extension under which a connection offers its BodyWriter.
BODY_WRITER = "evensong.body_writer"
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_END = b"data: [DONE]\n\n"


class Chunks(Protocol):
    """Makes the events of one streamed answer."""

    def of(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """What an output has to say: an event a choice, or none where nothing is certain yet."""

    def held(self) -> list[bytes]:
        """What was kept back, now that the engine ended the answer early."""

    def last(self) -> list[bytes]:
        """What comes after the last output."""


class BodyWriter(Protocol):
    """Writes to one connection past the layers of the application, once the response has begun."""

    def write(self, body: bytes) -> bool:
        """Writes a part of the response; False, with nothing written, while the client does not keep up."""

    async def drain(self) -> None:
        """Until the client has caught up, or is gone."""


async def respond_stream(request: Request, state: ServerState, job: Job, chunks: Chunks) -> StreamingResponse:
    """Starts the job; the stream, and with it the status line, begins once every prompt is admitted."""
    await _start(state, job)
    writer: BodyWriter | None = request.scope.get("extensions", {}).get(BODY_WRITER)
    if writer is None or not job.is_plain:
        return JobStream(state, job, _events(job, chunks))
    return PushedStream(state, job, chunks, writer)


async def respond_bytes(
    state: ServerState, job: Job, body: AsyncIterator[bytes], ended: Callable[[], None] | None = None
) -> StreamingResponse:
    """`respond_stream` for events that are bytes already; `ended` is called once they are sent, or the client left."""
    await _start(state, job)
    return JobStream(state, job, body, ended)


async def _start(state: ServerState, job: Job) -> None:
    state.enter()
    try:
        await job.start()
    except BaseException:
        state.leave()
        raise


def event_stream(body: AsyncIterator[bytes]) -> StreamingResponse:
    """A stream of server-sent events."""
    return StreamingResponse(body, media_type="text/event-stream", headers=_STREAM_HEADERS)


class JobStream(StreamingResponse):
    """Server-sent events of a job. However the response ends, or if it never begins, the job ends with it."""

    def __init__(
        self, state: ServerState, job: Job, body: AsyncIterator[bytes], ended: Callable[[], None] | None = None
    ) -> None:
        super().__init__(body, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._state = state
        self._job = job
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; a client that leaves cancels this, and the shield keeps the abort from being lost."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._state.leave()
            if self._ended is not None:
                self._ended()
            await asyncio.shield(self._job.stop())


class PushedStream(JobStream):
    """The same events, which only begin and end as those of other streams do: between, a BodyWriter has them."""

    def __init__(self, state: ServerState, job: Job, chunks: Chunks, writer: BodyWriter) -> None:
        self._chunks = chunks
        # From now on: every token has an event of its own, those too that come before the status line is sent.
        self._push = _Push(job.streams, chunks, writer)
        super().__init__(state, job, self._rest())

    async def stream_response(self, send: Send) -> None:
        """The status line, the events, the end."""
        try:
            await super().stream_response(send)
        finally:
            self._push.close()

    async def _rest(self) -> AsyncIterator[bytes]:
        """All that is pushed; then what is left to say."""
        try:
            await self._push.run()
            rest = self._chunks.last()
        except Exception as error:
            rest = _failed(self._job, self._chunks, error)
        for event in (*rest, _END):
            yield event


class _Push:
    """Hands outputs on as events where they are read. Its own task sleeps, but for a client that is slow."""

    def __init__(self, streams: list[RequestStream], chunks: Chunks, writer: BodyWriter) -> None:
        self._streams = streams
        self._chunks = chunks
        self._writer = writer
        self._num_open = len(streams)
        self._unwritten: list[bytes] = []
        self._error: Exception | None = None
        # The task has to look: the end, an error, or a client that does not keep up.
        self._call = asyncio.Event()
        self._begun = False
        for index, stream in enumerate(streams):
            stream.listen(partial(self._push, index, stream))
        self._push_all()

    async def run(self) -> None:
        """Until every stream has ended. Raises what one of them, or the making of an event, ends with."""
        self._begun = True
        self._push_all()
        while self._unwritten or (self._num_open and self._error is None):
            await self._call.wait()
            self._call.clear()
            await self._writer.drain()
            self._push_all()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing more is pushed."""
        for stream in self._streams:
            stream.listen(None)

    def _push_all(self) -> None:
        for index, stream in enumerate(self._streams):
            self._push(index, stream)

    def _push(self, index: int, stream: RequestStream) -> None:
        """Called by whoever reads the outputs, so it raises nothing."""
        if self._unwritten and self._begun:
            self._write()
        # Before the status line a client cannot be slow.
        if self._error is None and not (self._unwritten and self._begun):
            try:
                output = stream.take()
                if output is not None:
                    self._num_open -= output.finished
                    output, self._error = within_time(output)
                if output is not None:
                    self._unwritten += self._chunks.of(index, output)
            except Exception as error:
                self._error = error
            if self._begun:
                self._write()
        if self._unwritten or self._error is not None or not self._num_open:
            self._call.set()

    def _write(self) -> None:
        """Each in a write of its own: what a turn of the loop writes leaves the process at once all the same."""
        events, self._unwritten = self._unwritten, []
        for position, event in enumerate(events):
            if not self._writer.write(event):
                self._unwritten = events[position:]
                return


async def _events(job: Job, chunks: Chunks) -> AsyncIterator[bytes]:
    """The events; an error becomes one event before the end."""
    try:
        async for index, output in merged(job):
            # A prompt's log-probabilities, which may be many, in a thread.
            many = output.prompt_logprobs is not None
            for event in await asyncio.to_thread(chunks.of, index, output) if many else chunks.of(index, output):
                yield event
        for event in chunks.last():
            yield event
    except Exception as error:
        for event in _failed(job, chunks, error):
            yield event
    yield _END


def _failed(job: Job, chunks: Chunks, error: Exception) -> list[bytes]:
    """What was said before an error, and the error."""
    known = isinstance(error, EvensongError)
    if not known:
        logger.error("request %s failed in its stream", job.request_id, exc_info=error)
    return [*(chunks.held() if known else ()), b"data: " + encode(of_exception(error)[1]) + b"\n\n"]
