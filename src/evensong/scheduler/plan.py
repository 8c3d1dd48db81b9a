"""Plan: what one call of Scheduler.schedule collects, and the message that it becomes."""

from __future__ import annotations

from collections.abc import Mapping

from evensong.protocol.step import CachedRequestData, NewRequestData, SchedulerOutput
from evensong.scheduler.budget import Budget, SchedulerLimits
from evensong.scheduler.request import Request


class Plan:
    """Tokens of a step by request, within its budget. Changes no request."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = Budget(limits)
        self.scheduled: dict[str, int] = {}
        self.new: list[NewRequestData] = []
        # Pairs of blocks, from and to.
        self.copies: list[tuple[int, int]] = []
        # New blocks of requests that had a slot before.
        self._grown: dict[str, list[int]] = {}
        # Blocks are short: nobody new starts.
        self.crowded = False

    def go_on(self, request: Request, count: int, new_block_ids: list[int]) -> None:
        """A running request computes `count` tokens."""
        self._grown[request.request_id] = new_block_ids
        self.scheduled[request.request_id] = count
        self.budget.take(count)

    def start(self, request: Request, num_cached: int, count: int, block_ids: list[int]) -> None:
        """A request with a new slot computes `count` tokens behind the `num_cached` that the cache has."""
        source = request.source
        self.scheduled[request.request_id] = count
        self.budget.take(count)
        self.new.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_token_ids=source.prompt_token_ids,
                output_token_ids=request.token_ids[request.num_prompt_tokens :],
                params=source.params,
                eos_token_ids=source.eos_token_ids,
                block_ids=block_ids,
                num_computed_tokens=num_cached,
                prompt_logprobs_delivered=request.num_prompt_logprobs_sent,
            )
        )

    def drop(self, request: Request) -> None:
        """A running request is preempted: what it would have computed is not."""
        self.crowded = True
        self.budget.take(-self.scheduled.pop(request.request_id, 0))
        self._grown.pop(request.request_id, None)

    def output(self, step_id: int, requests: Mapping[str, Request], released: list[str]) -> SchedulerOutput:
        """The step as workers get it; `requests` are as they were before it."""
        cached = CachedRequestData([], [], [])
        sampling: list[str] = []
        constrained = False
        for request_id, count in self.scheduled.items():
            request = requests[request_id]
            if request_id in self._grown:
                cached.request_ids.append(request_id)
                cached.new_block_ids.append(self._grown[request_id])
                cached.num_computed_tokens.append(request.num_computed_tokens)
            if request.num_computed_tokens + count == request.num_tokens + request.num_unknown_tokens:
                sampling.append(request_id)
                constrained |= request.grammar is not None
        return SchedulerOutput(step_id, self.new, cached, self.scheduled, sampling, released, self.copies, constrained)
