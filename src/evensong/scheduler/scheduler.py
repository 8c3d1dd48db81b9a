"""Scheduler: gives each step's tokens to running requests, then to waiting ones (spec G1-G3).

There is no prefill or decode phase: a request has tokens known and tokens computed, and a step computes some of the
difference. A request whose last known token is computed in a step gets its next token sampled in it. Several plans may
be made before the first one's result comes; `ahead` says what they may hold (scheduler/ahead.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evensong.kvcache.check import check
from evensong.kvcache.loan import loan as loan_of
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.output import Admission, EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.stats import SchedulerStats
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.scheduler.admission import Pace, check_fits, check_queue, id_in_use
from evensong.scheduler.ahead import Ahead
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.commit import commit_prompt_scores, commit_tokens, end_without_token, final_output
from evensong.scheduler.grammar.bitmask import Bitmasks
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.scheduler.plan import Plan
from evensong.scheduler.policy import Policy
from evensong.scheduler.queue import WaitingQueue
from evensong.scheduler.request import Request, RequestStatus
from evensong.scheduler.siblings import awaits_sibling, lender, num_shared_tokens

Outputs = dict[int, list[EngineCoreOutput]]

# A waiting request lets a running one compute the prefix that they share for at most this many steps.
MAX_STEPS_BEHIND_A_WRITER = 256


def _anyone(request: Request) -> bool:
    """Nothing holds requests back."""
    return True


class Scheduler:
    """Who runs next. The only writer, with commit, of Request; called by one thread."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCacheManager,
        *,
        policy: Policy | None = None,
        ahead: Ahead | None = None,
        check: bool = False,
    ) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.requests: dict[str, Request] = {}
        self.policy = policy or Policy()
        self.ahead = ahead or Ahead()
        # In order of admission: of equals the last one gives way first.
        self.running: list[Request] = []
        # Which waiting requests may get a slot; the others keep their places.
        self.may_start: Callable[[Request], bool] = _anyone
        self._check = check
        self._bitmasks = Bitmasks()
        self._released: list[str] = []
        self._first_to_serve = 0
        self._step_id = 0
        self._num_arrivals = 0
        self._pace = Pace()
        self._stats = SchedulerStats()

    @property
    def waiting(self) -> WaitingQueue:
        """Requests without a slot, in the policy's order."""
        return self.policy.waiting

    # ---- arrivals and departures

    def prepare_request(self, source: EngineCoreRequest, num_behind: int = 0) -> Request:
        """A request that is added later, behind `num_behind` others; raises what add_request would raise now."""
        request = self._new_request(source)
        self._check_admission(request, num_behind)
        return request

    def add_request(
        self, source: EngineCoreRequest, *, prepared: Request | None = None, grammar: RequestGrammar | None = None
    ) -> Admission:
        """Admits a request to the queue; raises RequestError, with nothing changed, when it can never run or must not.

        Refused: more tokens than max_model_len or the whole pool can hold (400), a full queue (429), an id that lives.
        """
        request = prepared or self._new_request(source)
        self._check_admission(request)
        request.grammar = grammar
        self.kv_cache.extend_hashes(request.block_hashes, request.token_ids, source.cache_salt)
        hit = self.kv_cache.lookup(request.readable_hashes, request.num_tokens)
        self.requests[request.request_id] = request
        self._num_arrivals += 1
        request.rank.arrival, request.rank.waiting_since = self._num_arrivals, self._step_id
        self.waiting.append(request)
        return Admission(request.request_id, source.attempt, self.kv_cache.num_tokens_in(hit))

    def finish_requests(
        self, request_ids: Iterable[str], reason: FinishReason, stop_reason: str | None = None
    ) -> Outputs:
        """Ends requests early; ids that are not known are ignored. Returns their last outputs."""
        outputs: Outputs = {}
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request)
                last = final_output(request, reason, stop_reason=stop_reason)
                outputs.setdefault(request.source.client_index, []).append(last)
        return outputs

    def has_requests(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.requests)

    def has_begun_requests(self) -> bool:
        """True while a request runs, or waits to run again."""
        return bool(self.running) or any(request.begun for request in self.waiting)

    def preempt_all(self) -> None:
        """With no step in flight: every running request gives up its blocks and waits, in order, to be run again."""
        plan = Plan(self.limits)
        while self.running:
            self._preempt(self.running[-1], plan)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """The plan of the next step. One without tokens is none: it takes no number, and must not be handed on."""
        plan = Plan(self.limits)
        self.ahead.begin(len(self.running))
        self.kv_cache.free_passed((request.request_id, request.num_computed_tokens) for request in self.running)
        late = self._serve_running(plan)
        if not plan.crowded:
            self._serve_waiting(plan)
        if late and not plan.new:
            self._serve(late, {}, plan)
        return self._finish_plan(plan)

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Allowed tokens of the plan's constrained requests; None when there are none. Called while the model runs,
        once `knows_masks` is true: what a mask allows depends on all tokens before.
        """
        running = (self._still_runs(plan, request_id) for request_id in plan.sampling_request_ids)
        return self._bitmasks.fill(request for request in running if request is not None)

    def knows_masks(self, plan: SchedulerOutput) -> bool:
        """Whether the plan's constrained requests have no unknown token but the one that it samples."""
        if not plan.awaits_bitmask:
            return True
        running = (self._still_runs(plan, request_id) for request_id in plan.sampling_request_ids)
        return all(request is None or request.grammar is None or request.num_unknown_tokens <= 1 for request in running)

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> Outputs:
        """Applies what the step computed: publishes blocks, appends tokens, ends requests. Outputs by client index.

        A request that was aborted or lost its slot after `plan` was made is ignored: its blocks are no longer its own.
        """
        for new in plan.new_requests:
            self._publish(plan, new.request_id, new.num_computed_tokens)
        cached = plan.cached_requests
        for request_id, num_computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            self._publish(plan, request_id, num_computed)
        outputs = self._commit_prompts(plan, output)
        served: list[Request] = []
        for request_id, token_ids, logprobs in zip(
            output.request_ids, output.sampled_token_ids, output.logprobs, strict=True
        ):
            request = self._still_runs(plan, request_id)
            if request is None:
                continue
            request.learns()
            result = end_without_token(request, output)
            if result is None:
                result = commit_tokens(request, token_ids, logprobs, self.limits.max_model_len)
                self._claim_new_blocks(request)
                served.append(request)
            if result.finish_reason is not None:
                self._finish(request)
            outputs.setdefault(request.source.client_index, []).append(result)
        self.policy.sampled(served)
        if self._check:
            self.check_kv_cache()
        return outputs

    def _commit_prompts(self, plan: SchedulerOutput, output: ModelOutput) -> Outputs:
        """What the step computed of prompts, and the end of those for which that failed."""
        outputs: Outputs = {}
        for request_id, scores in output.prompt_scores.items():
            request = self._still_runs(plan, request_id)
            if request is not None:
                outputs.setdefault(request.source.client_index, []).append(commit_prompt_scores(request, scores))
        for request_id in output.errors.keys() - set(output.request_ids):
            request = self._still_runs(plan, request_id)
            if request is not None and (result := end_without_token(request, output)) is not None:
                self._finish(request)
                outputs.setdefault(request.source.client_index, []).append(result)
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

    def _new_request(self, source: EngineCoreRequest) -> Request:
        return Request(source, priority=source.priority if self.limits.use_priorities else 0)

    def _check_admission(self, request: Request, num_behind: int = 0) -> None:
        limits = self.limits
        if request.request_id in self.requests:
            raise id_in_use(request.request_id)
        check_fits(request, limits, self.kv_cache.capacity)
        if not request.resumed:
            free_slots = max(limits.max_num_seqs - len(self.running), 0) - num_behind
            check_queue(request, self.waiting, free_slots, limits, self._pace)

    def _serve_running(self, plan: Plan) -> list[Request]:
        """Tokens for requests that run; those that are not served, unless nobody starts.

        Where the budget ends early, the next step starts with those left out.
        """
        order = self.running[self._first_to_serve :] + self.running[: self._first_to_serve]
        self._first_to_serve = 0
        waits = len(order) < self.limits.max_num_seqs or self.policy.may_displace(order)
        leave = self.policy.order(order, waits, plan.budget.left)
        late = self.policy.pause(order, waits, self._step_id + 1)
        self._serve(order, leave, plan)
        return late

    def _serve(self, order: list[Request], leave: dict[str, int], plan: Plan) -> None:
        for request in order:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one that came before it in this step
            wanted = self.ahead.wanted(request, self._step_id + 1)
            if wanted == 0:
                continue  # its next token is not known yet
            count = plan.budget.share(wanted, leave=leave[request.request_id] if leave else 0)
            if count == 0:
                self._first_to_serve = self.running.index(request)
                break
            grown = self._make_room(request, request.num_computed_tokens + count, plan)
            if grown is not None:
                plan.go_on(request, count, grown)
                self.ahead.took(request)

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> list[int] | None:
        """New blocks for `request`, preempting the least urgent as needed; None when that was itself.

        None too, and nobody preempted, for a token that is not known yet: with the result that names it blocks may
        become free, and it may be the request's last.
        """
        while True:
            grown = self.kv_cache.grow(request.request_id, num_tokens)
            if grown is not None:
                return grown
            if request.num_unknown_tokens:
                plan.crowded = True
                return None
            victim = self.policy.gives_way(self.running)
            self._preempt(victim, plan)
            if victim is request:
                return None

    def _preempt(self, victim: Request, plan: Plan) -> None:
        plan.drop(victim)
        self._release_slot(victim)
        victim.wait(self._step_id + 1)
        self.waiting.push_front(victim)
        self._stats.num_preemptions += 1

    def _serve_waiting(self, plan: Plan) -> None:
        """Slots for waiting requests, in order; the first for which there is no room keeps what is free from the rest.

        Behind one that stands first by its age, and in other tenants' slots, some may still displace.
        """
        num_behind_writers = 0
        blocked = False
        for request in self._candidates():
            if plan.budget.left == 0:
                break
            if not self.may_start(request):
                continue
            free_slot = not blocked and len(self.running) + num_behind_writers < self.limits.max_num_seqs
            if not free_slot and not self.policy.displaceable(self.running, request, self._step_id + 1):
                if self.policy.stops_at(request):
                    break
                continue
            hit = self.kv_cache.lookup(request.readable_hashes, request.num_tokens)
            if request.rank.steps_behind < MAX_STEPS_BEHIND_A_WRITER and self._awaits_writer(request, hit):
                request.rank.steps_behind += 1
                num_behind_writers += 1
            elif not (free_slot and self._start(request, hit, plan)) and not self._displace(request, hit, plan):
                blocked = True
                if self.policy.stops_at(request):
                    break

    def _candidates(self) -> Iterable[Request]:
        """Waiting requests in order; none where all slots are taken by requests that nobody may displace."""
        if len(self.running) >= self.limits.max_num_seqs and not self.policy.may_displace(self.running):
            return ()
        return self.waiting.candidates(self._step_id)

    def _awaits_writer(self, request: Request, hit: list[int]) -> bool:
        """True when a running request computes the prefix that this one lacks: one as urgent, for the others wait."""
        hashes, num_cached = request.readable_hashes, self.kv_cache.num_tokens_in(hit)
        if awaits_sibling(request, num_cached, self.running, self._step_id + 1, self.policy.is_behind):
            return True
        writers = (
            (other.request_id, other.block_hashes)
            for other in self.running
            if not self.policy.is_behind(other, request)
        )
        return self.kv_cache.awaits_writer(hashes, num_cached, request.num_tokens, writers)

    def _start(self, request: Request, hit: list[int], plan: Plan) -> bool:
        """A slot for `request`, where all tokens that it has would fit now; it gets blocks for this step's alone.

        One that was preempted would otherwise take the blocks that it just gave up, and lose them again.
        """
        num_cached = self.kv_cache.num_tokens_in(hit)
        hit, copied, num_cached = self._loan(request, num_cached) or (hit, [], num_cached)
        count = plan.budget.share(request.num_tokens - num_cached)
        if count == 0 or not self.kv_cache.start(
            request.request_id,
            hit,
            request.block_hashes,
            num_cached + count,
            room_for=request.num_tokens,
            num_computed=num_cached,
        ):
            return False
        plan.copies += zip(copied, self.kv_cache.tables[request.request_id][len(hit) :], strict=False)
        self._admit(request, num_cached, count, plan)
        return True

    def _loan(self, request: Request, num_cached: int) -> tuple[list[int], list[int], int] | None:
        """A sibling's blocks to share and to copy, and the tokens in them, where those are more than `num_cached`."""
        count = num_shared_tokens(request)
        if count <= num_cached:
            return None
        other = lender(request, self.running, self._step_id + 1)
        loan = None if other is None else loan_of(self.kv_cache, other.request_id, count)
        return None if loan is None else (*loan, count)

    def _displace(self, request: Request, hit: list[int], plan: Plan) -> bool:
        """Preempts as many less urgent requests as `request` needs to start; none where all of them would not do."""
        victims = self.policy.displaceable(self.running, request, self._step_id + 1)
        tokens = sum(plan.scheduled.get(victim.request_id, 0) for victim in victims)
        if (
            not victims
            or not plan.budget.share(request.num_tokens - self.kv_cache.num_tokens_in(hit), more=tokens)
            or not self.kv_cache.would_fit(hit, request.num_tokens, without=[v.request_id for v in victims])
        ):
            return False
        for victim in victims:
            self._preempt(victim, plan)
            victim.displaced(self._step_id + 1)
            if self._start(request, hit, plan):
                return True
        raise AssertionError(f"{request.request_id} does not fit, though it would")

    def _admit(self, request: Request, num_cached: int, count: int, plan: Plan) -> None:
        request.rank.urgency = self.waiting.start(request)
        self.running.append(request)
        self._pace.started(bool(self.waiting))
        if not request.begun and self.kv_cache.enable_prefix_caching:
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hits += num_cached
        request.run(num_cached, self._step_id + 1)
        plan.start(request, num_cached, count, list(self.kv_cache.tables[request.request_id]))

    def _finish_plan(self, plan: Plan) -> SchedulerOutput:
        if not plan.scheduled:
            return plan.output(self._step_id + 1, self.requests, [])
        self._step_id += 1  # the id that _admit gave to requests that start in this plan
        released, self._released = self._released, []
        output = plan.output(self._step_id, self.requests, released)
        for request_id, count in plan.scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        for request_id in output.sampling_request_ids:
            self.requests[request_id].sampled_in(self._step_id)
        return output

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
