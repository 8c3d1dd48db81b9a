"""The real scheduler beside the naive one, on one stream of operations; every step is compared."""

from __future__ import annotations

import dataclasses
from collections import deque

from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.errors import RequestError
from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.stats import SchedulerStats
from evensong.protocol.step import ModelOutput, SchedulerOutput
from evensong.scheduler import policy
from evensong.scheduler.ahead import make_ahead
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import Scheduler
from evensong.testing.fake_executor import scripted_token
from tests.property.naive_scheduler import Job, NaiveScheduler, Windows
from tests.property.paged_executor import PagedExecutor


def solo(request: EngineCoreRequest, max_model_len: int) -> list[int]:
    """The output tokens of a request that has the engine to itself, those that it came with included."""
    job = Job(request, request.prompt_token_ids + request.output_token_ids)
    while True:
        job.tokens.append(scripted_token(job.tokens))
        if job.ends(max_model_len):
            return job.tokens[len(request.prompt_token_ids) :]


class World:
    """A scheduler with its executor, the naive model, and everything that was ever answered."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        caching: bool = True,
        windows: Windows = (None,),
        stages: int = 1,
        ahead: bool = False,
    ) -> None:
        self.limits = limits
        kv_cache = KVCacheManager(
            num_blocks,
            block_size,
            fingerprint="f",
            enable_prefix_caching=caching,
            windows=windows,
            max_step_tokens=limits.max_num_batched_tokens,
        )
        rules = make_ahead(stages, stages + ahead, limits.max_model_len)
        self.scheduler = Scheduler(limits, kv_cache, ahead=rules, check=True)
        self.naive = NaiveScheduler(limits, num_blocks, block_size, caching, windows, stages, ahead)
        self.executor = PagedExecutor(num_stages=stages, steps_ahead=int(ahead))
        groups = tuple(LayerGroup(window) for window in windows)
        self.executor.initialize_from_config(KVCacheConfig(num_blocks, block_size, groups), limits.max_model_len)
        self.sources: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scored: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.stats = SchedulerStats()
        self.in_flight: deque[tuple[SchedulerOutput, ModelOutput]] = deque()
        self.num_steps = self.num_planned_ahead = 0
        self.num_displacements = 0
        self.num_turns_by_age = 0
        self._displaced: dict[str, int] = {}

    def add(self, source: EngineCoreRequest) -> bool:
        """True when the request was admitted; a refusal must leave everything as it was."""
        before = self._state()
        try:
            self.scheduler.add_request(source)
        except RequestError:
            assert self._state() == before
            return False
        self.naive.add(source)
        self.sources[source.request_id] = source
        self.tokens[source.request_id] = list(source.output_token_ids)
        self.scored[source.request_id] = source.prompt_token_ids[: 1 + source.prompt_logprobs_delivered]
        return True

    def abort(self, request_id: str) -> None:
        """Ends a request between steps."""
        self._record(self.scheduler.finish_requests([request_id], FinishReason.ABORT))
        self.naive.remove(request_id)
        self.compare()

    def step(self, abort_meanwhile: str | None = None) -> None:
        """Plans while there is room, and applies one step; `abort_meanwhile` is aborted just before that."""
        self.num_steps += 1
        while len(self.in_flight) < self.executor.max_concurrent_batches and self._plan():
            pass
        if abort_meanwhile is not None:
            self._record(self.scheduler.finish_requests([abort_meanwhile], FinishReason.ABORT))
            self.naive.remove(abort_meanwhile)
        if self.in_flight:
            self._apply()
        self.compare()

    def _plan(self) -> bool:
        """Plans and runs a step; False where there is nothing to plan."""
        expected = self.naive.plan()
        plan = self.scheduler.schedule()
        assert list(plan.num_scheduled_tokens.items()) == list(expected.items())
        assert plan.total_num_scheduled_tokens <= self.limits.max_num_batched_tokens
        self._watch_displacements(plan.step_id)
        if not plan.num_scheduled_tokens:
            assert self.in_flight or not self.scheduler.has_requests(), "a step that does nothing"
            return False
        self.num_planned_ahead += any(self.scheduler.requests[name].num_unknown_tokens == 2 for name in expected)
        self.executor.pipeline.begin(plan)
        self.executor._execute(plan)
        self.executor.pipeline.sample()
        self.in_flight.append((plan, self.executor._sample()))
        return True

    def _apply(self) -> None:
        plan, output = self.in_flight.popleft()
        self.executor.pipeline.take()
        before = {request_id: len(tokens) for request_id, tokens in self.tokens.items()}
        self._record(self.scheduler.update_from_output(plan, output))
        sampled = self.naive.update()
        for request_id, tokens in self.tokens.items():
            assert tokens[before[request_id] :] == ([sampled[request_id]] if request_id in sampled else [])

    def set_budget(self, max_num_batched_tokens: int) -> None:
        """From the next step on a step holds this many tokens, but no more than windows count with, in both."""
        budget = min(max_num_batched_tokens, self.naive.longest_chunk)
        self.limits = dataclasses.replace(self.limits, max_num_batched_tokens=budget)
        self.scheduler.limits = self.naive.limits = self.limits

    def compare(self) -> None:
        """Queues, tables, free list and visible blocks are the naive model's."""
        scheduler, naive, pool = self.scheduler, self.naive, self.scheduler.kv_cache.pool
        assert [r.request_id for r in scheduler.running] == [j.source.request_id for j in naive.running]
        assert [r.request_id for r in scheduler.waiting] == [j.source.request_id for j in naive.waiting]
        assert scheduler.kv_cache.tables == {j.source.request_id: j.table for j in naive.running}
        assert pool.free_list() == naive.free
        assert pool.ref_counts == naive.refs
        assert {block for block, h in enumerate(pool.hashes) if h is not None} == set(naive.content)
        scheduler.check_kv_cache()

    def finish(self, max_steps: int = 5000) -> None:
        """Steps until nothing is left; every request that was not aborted has its solo tokens."""
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
            assert self.num_steps < max_steps, "livelock"
        for request_id, source in self.sources.items():
            alone = solo(source, self.limits.max_model_len)
            if self.finished[request_id] is FinishReason.ABORT:
                assert self.tokens[request_id] == alone[: len(self.tokens[request_id])]
            else:
                assert self.tokens[request_id] == alone
                wanted = source.prompt_token_ids if source.params.prompt_logprobs is not None else []
                assert self.scored[request_id] == (wanted or source.prompt_token_ids[:1])
        assert self.scheduler.check_kv_cache()["owned"] == 0
        self.stats = self.scheduler.make_stats()

    def close(self) -> None:
        """Ends the executor's thread."""
        self.executor.shutdown()

    def _record(self, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        for client_index, new in outputs.items():
            for output in new:
                source = self.sources[output.request_id]
                assert (client_index, output.attempt) == (source.client_index, source.attempt)
                assert output.request_id not in self.finished, "an output after the last one"
                assert output.start == len(self.tokens[output.request_id])
                self.tokens[output.request_id] += output.new_token_ids
                if output.prompt_scores is not None:
                    # Each token of the prompt once, in order, whatever was preempted.
                    assert output.prompt_scores.start == len(self.scored[output.request_id])
                    self.scored[output.request_id] += [at.token_ids[0] for at in output.prompt_scores.positions]
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason

    def _watch_displacements(self, step_id: int) -> None:
        """No request is displaced twice in so many steps, and none for one that is not more urgent."""
        for request in self.scheduler.waiting:
            if request.rank.displaced_step == step_id:
                before = self._displaced.get(request.request_id)
                assert before is None or step_id - before >= policy.STEPS_BETWEEN_DISPLACEMENTS
                self._displaced[request.request_id] = step_id
                self.num_displacements += 1
                assert any(
                    other.first_step_id == step_id and other.rank.priority < request.rank.urgency
                    for other in self.scheduler.running
                )
        for request in self.scheduler.running:
            if request.first_step_id == step_id:
                self.num_turns_by_age += request.rank.urgency != request.rank.priority

    def _state(self) -> object:
        scheduler = self.scheduler
        return (
            sorted(scheduler.requests),
            [r.request_id for r in scheduler.waiting],
            [r.request_id for r in scheduler.running],
            {k: list(v) for k, v in scheduler.kv_cache.tables.items()},
            scheduler.kv_cache.pool.free_list(),
        )
