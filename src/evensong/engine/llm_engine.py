"""LLMEngine: a blocking engine that its caller steps (spec F3)."""

from __future__ import annotations

from typing import Any

from evensong.config.resolve import EngineArgs
from evensong.config.sections import EngineConfig
from evensong.engine.client.base import SyncCoreClient
from evensong.engine.client.factory import make_client
from evensong.engine.frontend.front import FrontEnd, ModelFiles, load_model_files, make_front_end
from evensong.engine.frontend.input_processor import ProcessedRequest, Prompt
from evensong.engine.frontend.request_state import RequestState
from evensong.engine.frontend.verbs import control_verbs
from evensong.protocol.errors import EngineDeadError, RequestError
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.tokenizer import Tokenizer


class _Inbox:
    """What changed since the last step, and what failed."""

    def __init__(self) -> None:
        self.changed_states: list[RequestState] = []
        self.errors: list[Exception] = []

    def clear(self) -> None:
        """Forgets everything."""
        self.changed_states.clear()
        self.errors.clear()


class _Sink:
    """Where one request's news goes."""

    def __init__(self, inbox: _Inbox, request_id: str) -> None:
        self._inbox = inbox
        self._request_id = request_id

    def admitted(self) -> None:
        """Nothing waits for it here."""

    def changed(self, state: RequestState) -> None:
        """Noted for the step's result."""
        self._inbox.changed_states.append(state)

    def failed(self, error: Exception) -> None:
        """Raised by the step."""
        if isinstance(error, RequestError):
            error.request_id = self._request_id
        self._inbox.errors.append(error)


@control_verbs
class LLMEngine:
    """`add_request`, then `step` until nothing is unfinished. The core runs in a process of its own by default."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        multiprocess: bool = True,
        client: SyncCoreClient | None = None,
        files: ModelFiles | None = None,
    ) -> None:
        self.config = config
        # Read first: what is wrong with the model's files is said before a process starts.
        files = files or load_model_files(config)
        self._client = client or make_client(multiprocess, False, config)
        self._front: FrontEnd = make_front_end(config, files, self._client.resources)
        self._inbox = _Inbox()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, multiprocess: bool = True) -> LLMEngine:
        """The engine that `args` describe. Raises ConfigError or EngineStartError in one line."""
        return cls(args.create_engine_config(), multiprocess=multiprocess)

    @property
    def front(self) -> FrontEnd:
        """Input and output processing of this engine."""
        return self._front

    @property
    def resources(self) -> Any:
        """What the core learned at start-up."""
        return self._client.resources

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._front.inputs.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ProcessedRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> str:
        """Submits a request, as it is where it is processed; returns its internal id. Raises RequestError.

        Options: cache_salt, add_special_tokens, arrival_time, priority, timeout, tenant, trace_headers (W3C Trace
        Context).
        """
        params = SamplingParams(**self._front.sampling_defaults) if params is None else params
        trace_headers = options.pop("trace_headers", None)
        processed = prompt
        if not isinstance(processed, ProcessedRequest):
            processed = self._front.inputs.process(request_id, processed, params, **options)
        state = RequestState(request_id, processed, self._front.texts, _Sink(self._inbox, request_id))
        state.trace_headers = trace_headers or {}
        self._front.outputs.add(state)
        try:
            for child in processed.children:
                self._client.add_request(child)
        except BaseException:
            self._front.outputs.remove(state)
            raise
        return processed.children[0].request_id

    def abort_request(self, request_ids: str | list[str]) -> None:
        """Ends requests by the caller's ids or by internal ones; unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        open_ids = [
            i for one in ids for state in self._front.outputs.find(one) for i in self._front.outputs.abort(state)
        ]
        if open_ids:
            self._client.abort_requests(open_ids)

    def abort_all(self) -> None:
        """Ends everything that runs or waits; outputs that no step has returned yet are dropped."""
        open_ids = self._front.outputs.abort_all()
        self._inbox.clear()
        if open_ids:
            self._client.abort_requests(open_ids)

    def step(self) -> list[RequestOutput]:
        """Waits for the core's next message; the requests that it changed, as their output kind shows them.

        Raises RequestError for a request that the core refused or could not finish (its `request_id` says which; the
        others go on with the next step), EngineDeadError when the engine died.
        """
        try:
            message = self._client.get_output()
        except EngineDeadError as error:
            self._front.outputs.fail_all(error)
            self._inbox.clear()
            raise
        to_abort = self._front.outputs.process(message).to_abort
        if to_abort:
            self._client.abort_requests(to_abort)
        if self._inbox.errors:
            raise self._inbox.errors.pop(0)
        changed, self._inbox.changed_states = self._inbox.changed_states, []
        return [output for state in changed if (output := state.take()) is not None]

    def has_unfinished_requests(self) -> bool:
        """True while a request runs or waits."""
        return self._front.outputs.num_requests > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that run or wait."""
        return self._front.outputs.num_requests

    def call_verb(self, verb: str, **args: Any) -> Any:
        """Result of a control verb (protocol/control.py)."""
        return self._client.call_utility(verb, args.get("timeout"), **args)

    def do_log_stats(self) -> None:
        """Logs the stats line now."""
        self._front.outputs.stats_log.log_now()

    def shutdown(self) -> None:
        """Ends the core and frees everything; safe to call twice."""
        self._client.shutdown()
        self._front.outputs.tracer.close()
