"""EngineCore: the inner loop of one replica: schedule, execute, update (spec A1-A3, A5)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from evensong.config.resolve import read_tenant_weights
from evensong.config.sections import EngineConfig
from evensong.engine.core.batch_queue import BatchQueue
from evensong.engine.core.compiling import Compiling
from evensong.engine.core.deadlines import Deadlines
from evensong.engine.core.gate import Gate
from evensong.engine.core.plugins import load_general_plugins
from evensong.engine.core.request_checks import RequestChecks
from evensong.engine.core.startup import initialize_kv_caches
from evensong.executor.base import Executor
from evensong.kvcache.manager import KVCacheManager
from evensong.observe.phases import Phases
from evensong.protocol.errors import ErrorBody, RequestError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import Admission, EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.tenants import tenant_id
from evensong.scheduler.admission import id_in_use
from evensong.scheduler.ahead import make_ahead
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.commit import final_output
from evensong.scheduler.fairness import FairShare
from evensong.scheduler.grammar.manager import StructuredOutputManager, needs_grammar
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.scheduler.grammar.vocabulary import Vocabulary
from evensong.scheduler.policy import Policy
from evensong.scheduler.request import Request
from evensong.scheduler.scheduler import Scheduler
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer
from evensong.utils.logging import get_logger
from evensong.utils.progress import ProgressPage

Outputs = dict[int, list[EngineCoreOutput]]
CHECK_VARIABLE = "EVENSONG_CHECK_KV"

logger = get_logger(__name__)


class ExecutorFailed(RuntimeError):
    """A worker can no longer run."""


class Drafts(Protocol):
    """Where draft tokens come from, after a step. Without speculation: nowhere."""

    def take(self, executor: Executor, scheduler: Scheduler) -> None:
        """Moves draft tokens from the workers to the scheduler."""


class NoDrafts:
    """No speculation."""

    def take(self, executor: Executor, scheduler: Scheduler) -> None:
        """Nothing to move."""


class EngineCore:
    """One replica's scheduler and workers. Used by one thread; `aborts` may be filled by any.

    `make_executor` starts the workers and loads the weights. `learned` is set for a replacement; `progress` is where
    steps are counted. Raises ConfigError for settings that do not fit the model or the machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_executor: Callable[[], Executor],
        *,
        learned: Resources | None = None,
        progress: ProgressPage | None = None,
    ) -> None:
        phases = Phases()
        self.check_each_step = os.environ.get(CHECK_VARIABLE) == "1"
        load_general_plugins()
        with phases.phase("load model"):
            self.executor = make_executor()
        try:
            self.failure: str | None = None
            self.executor.register_failure_callback(self._executor_failed)
            resources = initialize_kv_caches(config, self.executor, learned, phases)
            self.scheduler = self._make_scheduler(config, resources)
            self.compiling = Compiling(make_grammars(config, resources.vocab_size))
            self._admissions: list[tuple[int, Admission]] = []
            self.deadlines = Deadlines(config.scheduler.request_timeout, config.scheduler.queue_timeout)
            self.progress = progress or ProgressPage()
            self.executor.watch_progress(self.progress)
            self.checks = RequestChecks(self.executor, resources)
            self.gate = Gate(self.scheduler, self.progress)
            self.steps = BatchQueue(self.executor, self.scheduler, self.progress)
        except BaseException:
            self.executor.shutdown()
            raise
        self.resources = _with_phases(resources, phases)
        self.drafts: Drafts = NoDrafts()
        self.aborts: SimpleQueue[list[str]] = SimpleQueue()
        # What start-up made stays; collections later need not walk it.
        gc.collect()
        gc.freeze()
        logger.info("core start-up: %s", phases.line())

    def add_request(self, request: EngineCoreRequest) -> Admission | None:
        """ADMITTED or REFUSED; None where the answer comes later, from `take_admissions`: a grammar is compiled first.

        Whatever admission raises is that request's answer; the core lives on.
        """
        return self._answered(request, lambda: self._add(request))

    def take_admissions(self) -> list[tuple[int, Admission]]:
        """Answers to earlier requests, each with its client's index."""
        answers, self._admissions = self._admissions, []
        for request, result in self.compiling.take_ready():
            admission = self._compiled(request, result)
            if admission is not None:
                answers.append((request.source.client_index, admission))
        return answers

    def _add(self, request: EngineCoreRequest) -> Admission | None:
        self.checks.check(request.params)
        if not needs_grammar(request):
            admission = self.scheduler.add_request(request)
            self.deadlines.watch(self.scheduler.requests[request.request_id])
            return admission
        if request.request_id in self.compiling:
            raise id_in_use(request.request_id)
        # What can be said now is said before a grammar is compiled for nothing.
        prepared = self.scheduler.prepare_request(request, num_behind=len(self.compiling))
        self.deadlines.watch(prepared)
        self.compiling.begin(prepared)
        return None

    def _compiled(self, request: Request, result: RequestGrammar | ErrorBody) -> Admission | None:
        if isinstance(result, ErrorBody):
            return Admission(request.request_id, request.source.attempt, refusal=result)
        add = self.scheduler.add_request
        return self._answered(request.source, lambda: add(request.source, prepared=request, grammar=result))

    def _answered(self, request: EngineCoreRequest, add: Callable[[], Admission | None]) -> Admission | None:
        try:
            return add()
        except RequestError as error:
            body = error.body()
        except Exception as error:  # a bug, or a part of another's
            logger.exception("request %s failed on admission", request.request_id)
            body = ErrorBody(f"the request failed on admission: {error}", 500, "internal_error")
        return Admission(request.request_id, request.attempt, refusal=body)

    def request_ids(self) -> list[str]:
        """Everything that was added and has not ended."""
        return [*self.scheduler.requests, *(request.request_id for request in self.compiling.requests())]

    def seconds_left(self) -> float | None:
        """How long the core may wait for a message while it has nothing to run; None for as long as it takes."""
        limits = (self.deadlines.seconds_left(), self.compiling.seconds_left())
        return min((limit for limit in limits if limit is not None), default=None)

    def finish_requests(self, request_ids: list[str], reason: FinishReason, stop_reason: str | None = None) -> Outputs:
        """Ends requests; their last outputs by client index."""
        outputs = self.scheduler.finish_requests(request_ids, reason, stop_reason)
        for request_id in request_ids if len(self.compiling) else ():
            request = self.compiling.cancel(request_id)
            if request is not None:
                # Whoever waits for its admission gets that, and its end.
                client_index = request.source.client_index
                self._admissions.append((client_index, Admission(request_id, request.source.attempt)))
                last = final_output(request, reason, stop_reason=stop_reason)
                outputs.setdefault(client_index, []).append(last)
        return outputs

    def has_work(self) -> bool:
        """True while steps are in flight, or one would compute something."""
        return len(self.steps) > 0 or self.gate.has_work()

    def step(self) -> tuple[Outputs, bool]:
        """Plans as far ahead as it may and applies one step's result; raises what the workers raise.

        Outputs by client index, and whether the model ran.
        """
        if self.failure is not None:
            raise ExecutorFailed(f"the workers failed: {self.failure}")
        outputs = self.end_overdue()
        if self.gate.has_work():
            self.steps.fill()
        if not self.steps:
            return outputs, False
        _merge(outputs, self._apply_oldest())
        return outputs, True

    def drain(self) -> Outputs:
        """Takes the results of all steps in flight and plans nothing: for what acts between steps."""
        outputs: Outputs = {}
        while self.steps:
            _merge(outputs, self._apply_oldest())
        return outputs

    def _apply_oldest(self) -> Outputs:
        """Waits for the oldest step in flight; requests that ended meanwhile get nothing of it."""
        plan, sampled = self.steps.take()
        outputs = self.process_aborts()
        _merge(outputs, self.scheduler.update_from_output(plan, sampled))
        if self.check_each_step:
            self.scheduler.check_kv_cache()
        self.steps.done()
        return outputs

    def post_step(self, model_ran: bool) -> None:
        """After a step's results were sent."""
        if model_ran:
            self.drafts.take(self.executor, self.scheduler)

    def process_aborts(self) -> Outputs:
        """Ends the requests whose aborts arrived since the last call."""
        outputs: Outputs = {}
        while True:
            try:
                request_ids = self.aborts.get_nowait()
            except Empty:
                return outputs
            _merge(outputs, self.finish_requests(request_ids, FinishReason.ABORT))

    def end_overdue(self) -> Outputs:
        """Ends the requests whose time is over."""
        outputs: Outputs = {}
        for request_id, reason in self.deadlines.overdue():
            _merge(outputs, self.finish_requests([request_id], FinishReason.ABORT, reason))
        return outputs

    def shutdown(self) -> None:
        """Ends the workers; safe to call twice."""
        self.compiling.shutdown()
        self.executor.shutdown()
        gc.unfreeze()

    def _executor_failed(self, reason: str) -> None:
        self.failure = reason

    def _make_scheduler(self, config: EngineConfig, resources: Resources) -> Scheduler:
        kv_cache = KVCacheManager(
            resources.num_blocks,
            resources.block_size,
            fingerprint=resources.fingerprint,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            windows=[group.window for group in resources.layer_groups],
            max_step_tokens=resources.max_num_batched_tokens,
        )
        limits = SchedulerLimits(
            max_num_seqs=resources.max_num_seqs,
            max_num_batched_tokens=resources.max_num_batched_tokens,
            max_model_len=resources.max_model_len,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
            max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
            use_priorities=config.scheduler.scheduling_policy == "priority",
        )
        num_stages = config.parallel.pipeline_parallel_size
        ahead = make_ahead(num_stages, self.executor.max_concurrent_batches, resources.max_model_len)
        return Scheduler(limits, kv_cache, policy=_make_policy(config), ahead=ahead)


def _merge(outputs: Outputs, more: Outputs) -> None:
    for client_index, new in more.items():
        outputs.setdefault(client_index, []).extend(new)


def _make_policy(config: EngineConfig) -> Policy:
    if config.scheduler.fair_share == "none":
        return Policy()
    weights = read_tenant_weights(config.scheduler.tenant_weights)
    return FairShare({tenant_id(name): weight for name, weight in weights.items()})


def make_grammars(config: EngineConfig, vocab_size: int) -> StructuredOutputManager:
    """The grammars of the configured model's vocabulary, whose tokenizer is read when the first one is needed."""
    model = config.model

    def make_vocabulary() -> Vocabulary:
        source = resolve_model(model.model, revision=model.revision, progress=False, fetched=True)
        return Vocabulary(lambda: load_tokenizer(source), vocab_size)

    return StructuredOutputManager(make_vocabulary)


def _with_phases(resources: Resources, phases: Phases) -> Resources:
    return msgspec.structs.replace(resources, phases=dict(phases.seconds))
