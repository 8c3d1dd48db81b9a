"""AsyncLLM: the engine on an event loop (spec F4). Many requests at once, one background task that reads the core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sized
from typing import Any

from evensong.config.resolve import EngineArgs
from evensong.config.sections import EngineConfig
from evensong.engine.client.base import AsyncCoreClient
from evensong.engine.client.factory import make_client
from evensong.engine.frontend.front import DEFAULT_MAX_N, FrontEnd, ModelFiles, load_model_files, make_front_end
from evensong.engine.frontend.input_processor import ProcessedRequest, Prompt
from evensong.engine.frontend.request_state import RequestState
from evensong.engine.frontend.verbs import control_verbs
from evensong.protocol.errors import EngineDeadError, EvensongError
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.tokenizer import Tokenizer
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

# Longer prompts, and requests of more choices, with more listed tokens or with bad words to tokenize, are processed in
# a thread, so that the loop answers others meanwhile.
INLINE_LENGTH = 4096
INLINE_CHOICES = 16


class RequestStream:
    """The outputs of one request, for one consumer. What a slow consumer has not taken is merged, never lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._admitted = asyncio.Event()
        self._error: Exception | None = None
        self.state: RequestState | None = None
        self._finished = False
        self._listener: Callable[[], None] | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """From now on `listener` is called, by whoever reads the engine's outputs, when there is something to take.

        It must not raise, nor take long. None: nobody listens any more.
        """
        self._listener = listener

    def attach(self, state: RequestState) -> None:
        """The request whose outputs these are."""
        self.state = state

    def admitted(self) -> None:
        """Called once the core has every choice of the request."""
        self._admitted.set()

    def changed(self, state: RequestState) -> None:
        """Called when there is something new to take."""
        if self._listener is None:
            self._event.set()
        else:
            self._listener()

    def failed(self, error: Exception) -> None:
        """Called when the request ends with an error."""
        self._error = error
        self._admitted.set()
        self._event.set()
        if self._listener is not None:
            self._listener()

    async def wait_admitted(self) -> None:
        """Until the core has admitted the request; raises what it was refused with."""
        await self._admitted.wait()
        if self._error is not None:
            raise self._error

    @property
    def finished(self) -> bool:
        """True once the last output was taken or the request failed."""
        return self._finished or self._error is not None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._finished:
            output = self.take()
            if output is not None:
                return output
            self._event.clear()
            await self._event.wait()
        raise StopAsyncIteration

    def take(self) -> RequestOutput | None:
        """The next output; None where there is nothing to take now. Raises what the request failed with after that."""
        assert self.state is not None
        output = self.state.take()
        if output is not None:
            self._finished = output.finished
        elif self._error is not None and not self._finished:
            raise self._error
        return output


@control_verbs
class AsyncLLM:
    """Made inside a running loop. `client` and `files` are given by the HTTP process, whose core runs already."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        multiprocess: bool = True,
        client: AsyncCoreClient | None = None,
        files: ModelFiles | None = None,
        max_n: int = DEFAULT_MAX_N,
    ) -> None:
        self.config = config
        files = files or load_model_files(config)
        self._client = client or make_client(multiprocess, True, config)
        self.front: FrontEnd = make_front_end(config, files, self._client.resources, max_n=max_n)
        self._handler: asyncio.Task[None] | None = None
        self._stopped = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, multiprocess: bool = True) -> AsyncLLM:
        """The engine that `args` describe. Raises ConfigError or EngineStartError in one line."""
        return cls(args.create_engine_config(), multiprocess=multiprocess)

    @property
    def resources(self) -> Any:
        """What the core learned at start-up."""
        return self._client.resources

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.front.inputs.tokenizer

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it is finished. Leaving the generator early aborts the request.

        Raises RequestError before the first output when it is refused, EngineDeadError when the engine dies.
        """
        stream = await self.start(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            await self.stop(stream)

    async def start(
        self, prompt: Prompt | ProcessedRequest, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> RequestStream:
        """Submits a request and waits until the core has admitted it. The stream must be handed to `stop` in the end.

        One that is processed already is submitted as it is. Options: cache_salt, add_special_tokens, arrival_time,
        priority, timeout, tenant, phase (of its reasoning), shown_token_ids (special tokens that have a text),
        trace_headers (W3C Trace Context). Raises RequestError when it is refused.
        """
        self._check_alive()
        trace_headers = options.pop("trace_headers", None)
        processed = await self._process(request_id, prompt, sampling_params, options)
        self._check_alive()
        stream = RequestStream()
        state = RequestState(request_id, processed, self.front.texts, stream)
        state.trace_headers = trace_headers or {}
        stream.attach(state)
        self.front.outputs.add(state)
        self._ensure_handler()
        try:
            for child in processed.children:
                if stream.finished:
                    break  # an earlier choice was refused, and with it the request
                await self._client.add_request(child)
            await stream.wait_admitted()
        except BaseException:
            self.front.outputs.abort(state)
            # All of them: one that was on its way when another was refused is running by now.
            await self._abort_in_core([child.request_id for child in processed.children])
            raise
        return stream

    async def stop(self, stream: RequestStream) -> None:
        """Ends a request that has not finished; nothing to do for one that has."""
        state = stream.state
        if state is None:
            return
        open_ids = self.front.outputs.abort(state)
        if open_ids:
            await self._abort_in_core(open_ids)

    async def abort(self, request_id: str) -> None:
        """Ends requests by the caller's id or by an internal one: their consumers get finish_reason abort."""
        ids = [i for state in self.front.outputs.find(request_id) for i in state.open_ids]
        if ids:
            await self._client.call_utility("abort_requests", request_ids=ids)

    async def abort_everything(self) -> None:
        """Ends all requests: their consumers get finish_reason abort."""
        ids = self.front.outputs.open_ids()
        if ids:
            await self._client.call_utility("abort_requests", request_ids=ids)

    async def call_verb(self, verb: str, **args: Any) -> Any:
        """Result of a control verb (protocol/control.py)."""
        self._ensure_handler()
        return await self._client.call_utility(verb, args.get("timeout"), **args)

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is dead."""
        self._check_alive()

    @property
    def is_running(self) -> bool:
        """True while the background task reads the core."""
        return self._handler is not None and not self._handler.done()

    @property
    def is_stopped(self) -> bool:
        """True after shutdown or death."""
        return self._stopped or self.errored

    @property
    def errored(self) -> bool:
        """True when the engine died."""
        return self._client.dead_error is not None and not self._stopped

    @property
    def dead_error(self) -> EngineDeadError:
        """Why the engine is dead, or a note that it is not."""
        return self._client.dead_error or EngineDeadError("the engine is not dead")

    def shutdown(self) -> None:
        """Ends the core and frees everything; requests that run fail. Safe to call twice."""
        if not self._stopped:
            self._stopped = True
            if self._handler is not None:
                self._handler.cancel()
            self._client.shutdown()
            self.front.outputs.fail_all(EngineDeadError("the engine was shut down"))
            self.front.outputs.tracer.close()

    async def _process(
        self, request_id: str, prompt: Prompt | ProcessedRequest, params: SamplingParams, options: dict[str, Any]
    ) -> ProcessedRequest:
        if isinstance(prompt, ProcessedRequest):
            return prompt
        process = self.front.inputs.process
        parts = prompt.values() if isinstance(prompt, Mapping) else [prompt]
        short = all(not isinstance(part, Sized) or len(part) <= INLINE_LENGTH for part in parts)
        if short and not (isinstance(params, SamplingParams) and _takes_long(params)):
            return process(request_id, prompt, params, **options)
        return await asyncio.to_thread(process, request_id, prompt, params, **options)

    async def _abort_in_core(self, internal_ids: list[str]) -> None:
        if self._client.dead_error is None:
            with contextlib.suppress(EngineDeadError):
                # A cancelled consumer must not cancel the abort of its own request.
                await asyncio.shield(self._client.abort_requests(internal_ids))

    def _ensure_handler(self) -> None:
        if self._handler is None or self._handler.done():
            self._handler = asyncio.create_task(self._read_outputs(), name="output-handler")

    async def _read_outputs(self) -> None:
        """Until the core dies. Whatever ends it, nobody goes on waiting; the next request starts it again."""
        try:
            while True:
                message = await self._client.get_output()
                to_abort = self.front.outputs.process(message).to_abort
                if to_abort:
                    await self._client.abort_requests(to_abort)
                # A large step's outputs must not keep consumers from running.
                await asyncio.sleep(0)
        except EngineDeadError as error:
            self.front.outputs.fail_all(error)
        except Exception as error:
            logger.exception("the outputs of the engine cannot be read")
            self._handler = None  # a request that comes from now on starts another one
            open_ids = self.front.outputs.open_ids()
            self.front.outputs.fail_all(EvensongError(f"the outputs of the engine cannot be read: {error!r}"))
            await self._abort_in_core(open_ids)

    def _check_alive(self) -> None:
        if self._stopped:
            raise EngineDeadError("the engine was shut down")
        if self._client.dead_error is not None:
            raise self._client.dead_error


def _takes_long(params: SamplingParams) -> bool:
    return params.n > INLINE_CHOICES or params.num_items > INLINE_LENGTH or bool(params.bad_words)
