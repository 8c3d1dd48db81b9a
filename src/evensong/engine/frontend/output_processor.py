"""OutputProcessor: what cores send, to the requests that wait for it (spec F2)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from evensong.engine.frontend.logprobs import TokenGap
from evensong.engine.frontend.output_state import ChoiceState
from evensong.engine.frontend.request_state import RequestState
from evensong.observe.metrics import EngineMetrics
from evensong.observe.stats_log import StatsLog
from evensong.observe.tracing import INCOMING, Ended, NoTracer, Tracer
from evensong.protocol.errors import EvensongError, RequestError
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs
from evensong.protocol.stats import SchedulerStats
from evensong.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass
class _Entry:
    """Where an internal id leads."""

    state: RequestState
    choice: ChoiceState
    last_token_time: float | None = None


@dataclass
class Processed:
    """What one message asks for: ids to abort in the core, and the requests that changed."""

    to_abort: list[str] = field(default_factory=list)
    changed: list[RequestState] = field(default_factory=list)


class OutputProcessor:
    """All requests of one front end. Not thread-safe: one loop owns it."""

    def __init__(self, metrics: EngineMetrics, stats_log: StatsLog, tracer: Tracer | None = None) -> None:
        self.metrics = metrics
        self.stats_log = stats_log
        self.tracer = tracer or NoTracer()
        self._entries: dict[str, _Entry] = {}
        self._requests: dict[str, RequestState] = {}

    @property
    def num_requests(self) -> int:
        """User requests that have not finished."""
        return len(self._requests)

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest unfinished request came, in seconds of the wall clock; None when there is none."""
        return next((state.metrics.arrival_time for state in self._requests.values()), None)

    def add(self, state: RequestState) -> None:
        """From now on outputs of the request's choices are accepted."""
        self._requests[state.choices[0].request.request_id] = state
        if self.tracer.on:
            state.trace_headers = state.trace_headers or INCOMING.get() or {}
        for choice in state.choices:
            self._entries[choice.request.request_id] = _Entry(state, choice)

    def remove(self, state: RequestState) -> list[str]:
        """Forgets a request, before its ABORT is sent; returns the internal ids that may still run."""
        open_ids = [i for i in state.open_ids if i in self._entries]
        for choice in state.choices:
            self._entries.pop(choice.request.request_id, None)
        self._requests.pop(state.choices[0].request.request_id, None)
        return open_ids

    def abort(self, state: RequestState) -> list[str]:
        """Forgets a request that its user gave up; returns the internal ids to abort in the core."""
        open_ids = self.remove(state)
        for _ in open_ids:
            self.metrics.finished("abort")
        if open_ids:
            self._trace(state)
        return open_ids

    def request_ids(self) -> list[str]:
        """The users' ids of all requests that have not finished."""
        return [state.request_id for state in self._requests.values()]

    def open_ids(self) -> list[str]:
        """Internal ids of everything that has not finished."""
        return list(self._entries)

    def abort_all(self) -> list[str]:
        """Forgets every request; returns the internal ids to abort in the core."""
        return [open_id for state in list(self._requests.values()) for open_id in self.abort(state)]

    def find(self, request_id: str) -> list[RequestState]:
        """Unfinished requests under a user's or an internal id."""
        return [s for s in self._requests.values() if request_id in (s.request_id, s.choices[0].request.request_id)]

    def process(self, message: EngineCoreOutputs) -> Processed:
        """Applies one message. Each changed request's sink is told once."""
        result = Processed()
        prompt_tokens = sum(self._admission(admission, result) for admission in message.admissions)
        touched: dict[int, RequestState] = {}
        num_tokens, now = 0, time.time()
        for output in message.outputs:
            entry = self._entries.get(output.request_id)
            if entry is not None and output.attempt == entry.choice.request.attempt:
                num_tokens += self._output(entry, output, result, now)
                touched[id(entry.state)] = entry.state
        for state in touched.values():
            if state.finished:
                self.remove(state)
                self._trace(state)
            state.sink.changed(state)
        result.changed = list(touched.values())
        self._figures(prompt_tokens, num_tokens, message.stats)
        return result

    def fail_all(self, error: EvensongError) -> None:
        """The engine died, or cannot be read: every waiter hears it."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._entries.clear()
        self.metrics.engine_dead()
        for state in requests:
            self._trace(state, error)
            state.sink.failed(error)

    def _admission(self, admission: Admission, result: Processed) -> int:
        """Takes an ADMITTED or REFUSED; returns the prompt tokens that were admitted with it."""
        entry = self._entries.get(admission.request_id)
        if entry is None or admission.attempt != entry.choice.request.attempt:
            return 0
        state = entry.state
        if admission.refusal is not None:
            refused = admission.request_id
            self.metrics.count("admission_rejections")
            result.to_abort.extend(i for i in self.remove(state) if i != refused)
            error = RequestError.from_body(admission.refusal)
            self._trace(state, error)
            state.sink.failed(error)
            return 0
        if state.num_cached_tokens is None:
            state.num_cached_tokens = admission.num_cached_tokens
        state.num_to_admit -= 1
        if state.num_to_admit == 0:
            state.sink.admitted()
        request = entry.choice.request
        # A prompt that comes again with some output was counted before.
        counts = entry.choice.index == 0 and not request.output_token_ids
        return len(request.prompt_token_ids) if counts else 0

    def _output(self, entry: _Entry, output: EngineCoreOutput, result: Processed, now: float) -> int:
        state, choice = entry.state, entry.choice
        if output.error is not None:
            self._fail(state, RequestError.from_body(output.error), result)
            return 0
        before = choice.num_violations
        try:
            if output.prompt_scores is not None:
                choice.num_violations += state.accept_prompt_scores(output.prompt_scores)
            count = choice.accept(output)
        except TokenGap as error:
            self._fail(state, EvensongError(f"the engine lost tokens of request {state.request_id}: {error}"), result)
            return 0
        except Exception as error:  # a bug on one output ends its request, never what others wait for
            logger.exception("an output of request %s cannot be processed", state.request_id)
            self._fail(state, EvensongError(f"the output of request {state.request_id} is broken: {error!r}"), result)
            return 0
        if choice.num_violations != before:
            self.metrics.count("determinism_violations", choice.num_violations - before)
        if output.start == 0 and choice.index == 0:
            state.num_cached_tokens = output.num_cached_tokens
        if count:
            self._times(entry, count, output.scheduled_time, now)
        if count or choice.finish_reason is not None:
            state.mark_changed(choice, count, now)
        if choice.finish_reason is not None:
            # A time limit is told apart from a client that left.
            late = choice.finish_reason == "abort" and choice.stop_reason
            self.metrics.finished(str(late or choice.finish_reason))
            if output.finish_reason is None:
                # A stop string ended it here; the core does not know yet.
                result.to_abort.append(output.request_id)
            self._entries.pop(output.request_id, None)
        return count

    def _fail(self, state: RequestState, error: Exception, result: Processed) -> None:
        result.to_abort.extend(self.remove(state))
        self.metrics.finished("error")
        self._trace(state, error)
        state.sink.failed(error)

    def _trace(self, state: RequestState, error: Exception | None = None) -> None:
        """A request has ended, however it came."""
        if not self.tracer.on:
            return
        otherwise = "abort" if error is None else "error"
        ended = Ended(
            state.request_id,
            state.processed.params,
            state.metrics,
            num_prompt_tokens=len(state.processed.prompt_token_ids),
            num_output_tokens=sum(len(choice.token_ids) for choice in state.choices),
            num_cached_tokens=state.num_cached_tokens or 0,
            finish_reasons=[choice.finish_reason or otherwise for choice in state.choices],
            trace_headers=state.trace_headers,
            error=None if error is None else str(error),
        )
        self.tracer.request(ended)

    def _times(self, entry: _Entry, count: int, scheduled_time: float, now: float) -> None:
        metrics = entry.state.metrics
        if scheduled_time:
            metrics.first_scheduled_time = metrics.first_scheduled_time or scheduled_time
            self.metrics.observe("request_queue_time", scheduled_time - metrics.arrival_time)
        if entry.last_token_time is None:
            self.metrics.observe("time_to_first_token", now - metrics.arrival_time)
        else:
            self.metrics.observe("inter_token_latency", (now - entry.last_token_time) / count)
        entry.last_token_time = now
        if entry.choice.finish_reason is not None:
            self.metrics.observe("e2e_request_latency", now - metrics.arrival_time)

    def _figures(self, prompt_tokens: int, num_tokens: int, stats: SchedulerStats | None) -> None:
        self.metrics.count("prompt_tokens", prompt_tokens)
        self.metrics.count("generation_tokens", num_tokens)
        if stats is not None:
            self.metrics.update(stats)
        self.stats_log.record(prompt_tokens, num_tokens, stats)
