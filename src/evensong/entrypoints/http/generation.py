"""Runs one HTTP request's prompts on the engine: admission first, then outputs; all of it ends with the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from evensong.engine.async_llm import AsyncLLM, RequestStream
from evensong.engine.frontend.input_processor import Prompt
from evensong.entrypoints.http.forms_out import Envelope, Usage, encode
from evensong.entrypoints.http.service import in_time
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput, RequestOutput
from evensong.protocol.sampling_params import SamplingParams

T = TypeVar("T")
# The status that proxies give to a request whose client has gone.
CLIENT_LEFT = 499
# (prompt index, output, choice) -> the choice's object.
MakeChoice = Callable[[int, RequestOutput, CompletionOutput], dict[str, Any]]


@dataclass
class Job:
    """One HTTP request for tokens. `check` sees it once every prompt is tokenized, and may still refuse it.

    `grammar_of` is the request's field of which its structured_outputs were made, where it did not bring them.
    """

    engine: AsyncLLM
    request_id: str
    prompts: list[Prompt]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Job], None] | None = None
    grammar_of: str | None = None
    streams: list[RequestStream] = field(default_factory=list)

    async def start(self) -> None:
        """Every prompt is admitted; raises what the first refused one was refused with, and leaves nothing running."""
        starts = [
            self.engine.start(prompt, self.params, name, **self.options)
            for prompt, name in zip(self.prompts, self.names(), strict=True)
        ]
        await self._start_all(starts)

    def names(self) -> list[str]:
        """A request id for each prompt."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(len(self.prompts))]

    async def _start_all(self, starts: Sequence[Coroutine[Any, Any, RequestStream]]) -> None:
        """All at once: an admission is answered between two steps, and each would wait for a step of its own."""
        self.streams = []
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            # In the order of the prompts, so that the same bad request gets the same answer.
            for task in tasks:
                self.streams.append(await self._named(task))
            if self.check is not None:
                self.check(self)
        except BaseException:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self.streams = [result for result in results if isinstance(result, RequestStream)]
            await self.stop()
            raise

    async def _named(self, admission: asyncio.Future[RequestStream]) -> RequestStream:
        """The stream; a refused grammar is blamed on the field that the user wrote."""
        try:
            return await admission
        except RequestError as error:
            if self.grammar_of is None or error.param != "structured_outputs":
                raise
            message = f"{self.grammar_of}: {error.message}"
            body = msgspec.structs.replace(error.body(), param=self.grammar_of, message=message)
            raise RequestError.from_body(body) from error

    async def stop(self) -> None:
        """Ends what has not finished."""
        for stream in self.streams:
            await self.engine.stop(stream)

    @property
    def is_plain(self) -> bool:
        """Whether its outputs are those of its streams, and none is so large that a thread should look at it."""
        return self.params.prompt_logprobs is None

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, each with its prompt's index."""
        return _as_they_come(self)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(stream.state.processed.prompt_token_ids) for stream in self.streams if stream.state is not None)

    @property
    def seed(self) -> int | None:
        """The seed of the first choice, drawn here where the request had none."""
        state = self.streams[0].state
        return None if state is None else state.processed.params.seed


async def respond_whole(
    request: Request, state: ServerState, job: Job, collect: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
) -> Response:
    """Starts the job and answers with what `collect` makes of it; a client that leaves aborts it."""
    state.enter()
    try:
        form = await _unless_client_leaves(request, _whole(job, collect))
        # Nobody reads the second one; the status is for whoever counts responses.
        if form is None:
            return Response(status_code=CLIENT_LEFT)
        return Response(encode(form), media_type="application/json")
    finally:
        await job.stop()
        state.leave()


async def _whole(job: Job, collect: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    await job.start()
    return await collect()


async def _unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the client disconnects first, which cancels it."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for other in (task, watch):
            if not other.done():
                other.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await other


async def _left(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def merged(job: Job) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all prompts as they come, each with its prompt's index. Raises RequestError when the time is over."""
    async for index, output in in_time(job.outputs()):
        yield index, output


async def _as_they_come(job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(job.streams) == 1:
        async for output in job.streams[0]:
            yield 0, output
        return
    pending = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(job.streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                result = task.result()
                if result is not None:
                    pending[asyncio.ensure_future(anext(job.streams[index], None))] = index
                    yield index, result
    finally:
        for task in pending:
            task.cancel()


async def collect_whole(
    job: Job, envelope: Envelope, make_choice: MakeChoice, usage: Usage | None = None
) -> dict[str, Any]:
    """The response of a job that is not streamed; its tokens are counted in `usage`."""
    usage = usage or Usage()
    choices: list[dict[str, Any]] = []
    async for index, output in merged(job):
        usage.add(index, output)
        choices += await make_choices(make_choice, index, output)
    return envelope.whole(sorted(choices, key=lambda choice: int(choice["index"])), usage)


async def make_choices(make_choice: MakeChoice, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
    """The objects of an output's choices; a prompt's log-probabilities, which may be many, in a thread."""

    def work() -> list[dict[str, Any]]:
        return [make_choice(prompt_index, output, choice) for choice in output.outputs]

    return work() if output.prompt_logprobs is None else await asyncio.to_thread(work)
