"""Scheduler: gives each step's tokens to running requests, then to waiting ones (spec G1-G3).

There is no prefill or decode phase: a request has tokens known and tokens computed, and a step computes some of the
difference. A request whose last known token is computed in a step gets its next token sampled in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from evensong.kvcache.check import check
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.errors import ErrorBody, RequestError
from evensong.protocol.output import Admission, EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.stats import SchedulerStats
from evensong.protocol.step import CachedRequestData, GrammarBitmask, ModelOutput, NewRequestData, SchedulerOutput
from evensong.scheduler.budget import Budget, SchedulerLimits
from evensong.scheduler.commit import commit_tokens, final_output
from evensong.scheduler.queue import WaitingQueue
from evensong.scheduler.request import Request, RequestStatus

Outputs = dict[int, list[EngineCoreOutput]]

# A waiting request lets a running one compute the prefix that they share for at most this many steps.
MAX_STEPS_BEHIND_A_WRITER = 256
RETRY_AFTER_SECONDS = 1


class _Plan:
    """What one call of schedule() collects."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = Budget(limits)
        self.scheduled: dict[str, int] = {}
        self.new: list[NewRequestData] = []
        self.grown: dict[str, list[int]] = {}
        self.preempted = False


class Scheduler:
    """Who runs next. The only writer, with commit, of Request; called by one thread."""

    def __init__(self, limits: SchedulerLimits, kv_cache: KVCacheManager, *, check: bool = False) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        # In order of admission: the last one is preempted first.
        self.running: list[Request] = []
        self._check = check
        self._released: list[str] = []
        self._first_to_serve = 0
        self._step_id = 0
        self._stats = SchedulerStats()

    # ---- arrivals and departures

    def add_request(self, source: EngineCoreRequest) -> Admission:
        """Admits a request to the queue; raises RequestError, with nothing changed, when it can never run or must not.

        Refused: more tokens than max_model_len or the whole pool can hold (400), a full queue (429), an id that lives.
        """
        request = Request(source)
        self._check_admission(request)
        self.kv_cache.extend_hashes(request.block_hashes, request.token_ids, source.cache_salt)
        hit = self.kv_cache.lookup(request.block_hashes, request.num_tokens)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return Admission(request.request_id, source.attempt, self.kv_cache.num_tokens_in(hit))

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason) -> Outputs:
        """Ends requests before their time; ids that are not known are ignored. Returns their last outputs."""
        outputs: Outputs = {}
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request)
                outputs.setdefault(request.source.client_index, []).append(final_output(request, reason))
        return outputs

    def has_requests(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.requests)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """The plan of the next step."""
        plan = _Plan(self.limits)
        self.kv_cache.free_passed((request.request_id, request.num_computed_tokens) for request in self.running)
        self._serve_running(plan)
        if not plan.preempted:
            self._serve_waiting(plan)
        return self._finish_plan(plan)

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Allowed tokens of the plan's constrained requests; None when there are none."""
        return None

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> Outputs:
        """Applies what the step computed: publishes blocks, appends tokens, ends requests. Outputs by client index.

        A request that was aborted or lost its slot after `plan` was made is ignored: its blocks are no longer its own.
        """
        for new in plan.new_requests:
            self._publish(plan, new.request_id, new.num_computed_tokens)
        cached = plan.cached_requests
        for request_id, num_computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            self._publish(plan, request_id, num_computed)
        outputs: Outputs = {}
        for request_id, token_ids, logprobs in zip(
            output.request_ids, output.sampled_token_ids, output.logprobs, strict=True
        ):
            request = self._still_runs(plan, request_id)
            if request is None:
                continue
            if request_id in output.errors:
                error = ErrorBody(output.errors[request_id], 500, "internal_error")
                result = final_output(request, FinishReason.ERROR, error)
            else:
                result = commit_tokens(request, token_ids, logprobs, self.limits.max_model_len)
                self._claim_new_blocks(request)
            if result.finish_reason is not None:
                self._finish(request)
            outputs.setdefault(request.source.client_index, []).append(result)
        if self._check:
            self.check_kv_cache()
        return outputs

    # ---- figures and checks

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counts since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)
        stats.kv_cache_usage = self.kv_cache.usage
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forgets cached blocks; False, with nothing changed, while requests hold some."""
        return self.kv_cache.reset_prefix_cache()

    def check_kv_cache(self) -> dict[str, int]:
        """Proves the KV cache's invariants and that exactly the running requests hold tables; returns the counts."""
        running = {request.request_id: request.num_computed_tokens for request in self.running}
        counts = check(self.kv_cache, running)
        assert set(self.kv_cache.tables) == set(running), "a table belongs to a request that does not run"
        return counts

    # ---- inside

    def _check_admission(self, request: Request) -> None:
        source, limits = request.source, self.limits
        if source.request_id in self.requests:
            raise RequestError(f"request id {source.request_id} is in use", status=409, param="request_id")
        if not source.prompt_token_ids:
            raise RequestError("the prompt holds no token", param="prompt")
        if request.num_tokens >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {request.num_tokens} tokens; with at least one token of output that is more than "
                f"max_model_len {limits.max_model_len}",
                param="prompt",
            )
        most = limits.max_model_len
        if source.params.max_tokens is not None:
            most = min(most, request.num_prompt_tokens + source.params.max_tokens)
            if request.num_output_tokens >= source.params.max_tokens:
                raise RequestError(
                    f"the request comes with {request.num_output_tokens} tokens of output, and max_tokens is "
                    f"{source.params.max_tokens}: there is nothing left to do",
                    param="max_tokens",
                )
        # The last token of an output is never computed, so it needs no place.
        most -= 1
        pool_tokens = self.kv_cache.capacity
        if pool_tokens is not None and most > pool_tokens:
            raise RequestError(
                f"the prompt ({request.num_prompt_tokens} tokens) with its output needs room for {most} tokens; "
                f"the whole KV cache holds {pool_tokens}",
                param="prompt" if request.num_prompt_tokens > pool_tokens else "max_tokens",
            )
        # After a preemption the output so far is computed again with the prompt, in one piece here.
        if not limits.enable_chunked_prefill and most > limits.max_num_batched_tokens:
            raise RequestError(
                f"the prompt ({request.num_prompt_tokens} tokens) with its output may need {most} tokens in one step; "
                f"without chunked prefill a step holds at most {limits.max_num_batched_tokens}",
                param="prompt" if request.num_prompt_tokens > limits.max_num_batched_tokens else "max_tokens",
            )
        # Those that the next step can take do not count as queued, however quickly they came.
        free_slots = max(limits.max_num_seqs - len(self.running), 0)
        if not request.resumed and len(self.waiting) >= limits.max_num_queued_reqs + free_slots:
            raise RequestError(
                f"{len(self.waiting)} requests wait already, the most allowed",
                status=429,
                type="rate_limit_error",
                code="queue_full",
                retry_after=RETRY_AFTER_SECONDS,
            )

    def _serve_running(self, plan: _Plan) -> None:
        """Tokens for requests that run. Where the budget ends early, the next step starts with those left out."""
        order = self.running[self._first_to_serve :] + self.running[: self._first_to_serve]
        self._first_to_serve = 0
        for request in order:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one that came before it in this step
            wanted = request.num_tokens - request.num_computed_tokens
            if wanted == 0:
                continue  # its next token is not known yet
            count = plan.budget.share(wanted)
            if count == 0:
                self._first_to_serve = self.running.index(request)
                break
            grown = self._make_room(request, request.num_computed_tokens + count, plan)
            if grown is not None:
                plan.grown[request.request_id] = grown
                plan.scheduled[request.request_id] = count
                plan.budget.take(count)

    def _make_room(self, request: Request, num_tokens: int, plan: _Plan) -> list[int] | None:
        """New blocks for `request`, preempting the newest running ones as needed; None when it was the newest."""
        while True:
            grown = self.kv_cache.grow(request.request_id, num_tokens)
            if grown is not None:
                return grown
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return None

    def _preempt(self, victim: Request, plan: _Plan) -> None:
        plan.preempted = True
        plan.budget.take(-plan.scheduled.pop(victim.request_id, 0))
        plan.grown.pop(victim.request_id, None)
        self._release_slot(victim)
        victim.status = RequestStatus.WAITING
        victim.num_computed_tokens = 0
        victim.steps_waited = 0
        self.waiting.push_front(victim)
        self._stats.num_preemptions += 1

    def _serve_waiting(self, plan: _Plan) -> None:
        """Slots for waiting requests, in order; the first for which there is no room stops those behind it.

        A request starts only where all tokens that it has would fit now, though it gets blocks for this step's alone:
        one that was preempted would otherwise take the blocks that it just gave up, and lose them again.
        """
        num_behind_writers = 0
        for request in list(self.waiting) if len(self.running) < self.limits.max_num_seqs else ():
            if len(self.running) + num_behind_writers >= self.limits.max_num_seqs or plan.budget.left == 0:
                break
            hashes = request.block_hashes
            hit = self.kv_cache.lookup(hashes, request.num_tokens)
            num_cached = self.kv_cache.num_tokens_in(hit)
            if request.steps_waited < MAX_STEPS_BEHIND_A_WRITER and self.kv_cache.awaits_writer(
                hashes, num_cached, request.num_tokens
            ):
                request.steps_waited += 1
                num_behind_writers += 1
                continue
            count = plan.budget.share(request.num_tokens - num_cached)
            if count == 0 or not self.kv_cache.start(
                request.request_id, hit, hashes, num_cached + count, room_for=request.num_tokens
            ):
                break
            self._admit(request, num_cached, count, plan)

    def _admit(self, request: Request, num_cached: int, count: int, plan: _Plan) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        if request.first_cached_tokens is None:
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hits += num_cached
        request.run(num_cached, self._step_id + 1)
        source = request.source
        plan.scheduled[request.request_id] = count
        plan.budget.take(count)
        plan.new.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_token_ids=source.prompt_token_ids,
                output_token_ids=request.token_ids[request.num_prompt_tokens :],
                params=source.params,
                eos_token_ids=source.eos_token_ids,
                block_ids=list(self.kv_cache.tables[request.request_id]),
                num_computed_tokens=num_cached,
            )
        )

    def _finish_plan(self, plan: _Plan) -> SchedulerOutput:
        cached = CachedRequestData([], [], [])
        sampling: list[str] = []
        for request_id, count in plan.scheduled.items():
            request = self.requests[request_id]
            if request_id in plan.grown:
                cached.request_ids.append(request_id)
                cached.new_block_ids.append(plan.grown[request_id])
                cached.num_computed_tokens.append(request.num_computed_tokens)
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                sampling.append(request_id)
        released, self._released = self._released, []
        self._step_id += 1  # the id that _admit gave to requests that start in this plan
        return SchedulerOutput(self._step_id, plan.new, cached, plan.scheduled, sampling, released)

    def _still_runs(self, plan: SchedulerOutput, request_id: str) -> Request | None:
        """The request if it has held its slot ever since `plan` was made."""
        request = self.requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING or request.first_step_id > plan.step_id:
            return None
        return request

    def _publish(self, plan: SchedulerOutput, request_id: str, num_computed: int) -> None:
        """After `plan` ran: shows what it computed for a request beyond the first `num_computed` tokens."""
        done = num_computed + plan.num_scheduled_tokens[request_id]
        block_size = self.kv_cache.block_size
        if done // block_size == num_computed // block_size:
            return  # no block became full, as in most decode steps
        request = self._still_runs(plan, request_id)
        if request is not None:
            self.kv_cache.publish(request_id, request.block_hashes, done)

    def _claim_new_blocks(self, request: Request) -> None:
        """After new tokens: their full blocks get hashes, and this request is named as their writer."""
        known = len(request.block_hashes)
        if request.num_tokens // self.kv_cache.block_size == known:
            return
        self.kv_cache.extend_hashes(request.block_hashes, request.token_ids, request.source.cache_salt)
        if len(request.block_hashes) > known:
            self.kv_cache.claim(request.request_id, request.block_hashes)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release_slot(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _release_slot(self, request: Request) -> None:
        self.kv_cache.free(request.request_id)
        index = self.running.index(request)
        del self.running[index]
        if index < self._first_to_serve:
            self._first_to_serve -= 1
        self._released.append(request.request_id)
