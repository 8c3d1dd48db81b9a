"""FairShare: tenants get equal or weighted shares of the service, however much each asks for.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant's
counter grows with its input and output tokens, divided by its weight; the waiting tenant with the lowest counter goes
next. A tenant that comes back is lifted to the lowest counter of those that wait, so that nobody saves up idle time.
Within a tenant the order is that of scheduler/policy.py; between tenants priorities mean nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from evensong.scheduler.policy import Policy
from evensong.scheduler.queue import WaitingQueue
from evensong.scheduler.request import Request, RequestStatus

# An output token takes a row of a step as an input token does, but comes alone: the paper's weights.
INPUT_COST, OUTPUT_COST = 1.0, 2.0
# Counters of tenants that are idle and owe nothing are dropped beyond this many.
MAX_IDLE_TENANTS = 4096


class FairQueue(WaitingQueue):
    """A queue for each tenant; the tenant with the lowest counter goes first."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._queues: dict[str, WaitingQueue] = {}
        self._counters: dict[str, float] = {}
        self._last_counter = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._queues, key=self.counter):
            yield from self._queues[tenant]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests that wait."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def most_urgent(self) -> int:
        """The urgency of the first request of the tenant that goes first."""
        return self._queues[self.first_tenant()].most_urgent

    def first_tenant(self) -> str:
        """The waiting tenant with the lowest counter; the queue must not be empty."""
        return min(self._queues, key=self.counter)

    def counter(self, tenant: str) -> float:
        """Weighted tokens that a tenant has had."""
        return self._counters.get(tenant, 0.0)

    def waiting_of(self, tenant: str) -> WaitingQueue | None:
        """A tenant's own queue; None where none of its requests waits."""
        return self._queues.get(tenant)

    def charge(self, tenant: str, cost: float) -> None:
        """Adds to a tenant's counter."""
        self._counters[tenant] = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)

    def append(self, request: Request) -> None:
        """A request that arrives: behind those of its kind and tenant."""
        self._queue(request).append(request)

    def push_front(self, request: Request) -> None:
        """A preempted request: before every other of its urgency and tenant."""
        self._queue(request).push_front(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        queue = self._queues.get(request.source.tenant)
        assert queue is not None, f"request {request.request_id} does not wait"
        queue.remove(request)
        self._close_if_empty(request.source.tenant)

    def candidates(self, step_id: int) -> Iterator[Request]:
        """In the order in which slots are given, as counters will stand when those before have started.

        Of a tenant nobody comes after one that could not start, unless that one waits for a prefix.
        """
        heap = [(self.counter(tenant), tenant) for tenant in self._queues]
        heapq.heapify(heap)
        rest: dict[str, Iterator[Request]] = {}
        while heap:
            counter, tenant = heapq.heappop(heap)
            if tenant not in rest:
                rest[tenant] = iter(self._queues[tenant].candidates(step_id) if tenant in self._queues else ())
            request = next(rest[tenant], None)
            if request is not None:
                steps_behind = request.rank.steps_behind
                yield request
                if request.status is RequestStatus.WAITING and request.rank.steps_behind == steps_behind:
                    continue
                heapq.heappush(heap, (counter + _input_cost(request) / self._weights.get(tenant, 1.0), tenant))

    def is_aged(self, request: Request) -> bool:
        """True for a candidate that stands first of its tenant by its age alone."""
        queue = self._queues.get(request.source.tenant)
        return queue is not None and queue.is_aged(request)

    def start(self, request: Request) -> int:
        """Takes out a request that gets a slot and charges its input, once; returns the urgency at which it stands."""
        tenant = request.source.tenant
        urgency = self._queues[tenant].start(request)
        self.charge(tenant, _input_cost(request))
        self._close_if_empty(tenant)
        return urgency

    def _queue(self, request: Request) -> WaitingQueue:
        tenant = request.source.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            floor = min(map(self.counter, self._queues)) if self._queues else self._last_counter
            self._forget_idle(floor)
            self._counters[tenant] = max(self.counter(tenant), floor)
            queue = self._queues[tenant] = WaitingQueue()
            self.mixed = True
        return queue

    def _close_if_empty(self, tenant: str) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last_counter = self.counter(tenant)

    def _forget_idle(self, floor: float) -> None:
        if len(self._counters) > MAX_IDLE_TENANTS + len(self._queues):
            self._counters = {t: c for t, c in self._counters.items() if c > floor or t in self._queues}


class FairShare(Policy):
    """By tenant, then by priority, then by arrival. `weights` by tenant; others have 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._queue = FairQueue(weights)
        self.waiting = self._queue

    def key(self, request: Request) -> tuple[float, int]:
        """The tenant's counter, then the urgency: who has had most gives way first."""
        return self._queue.counter(request.source.tenant), request.rank.urgency

    def first_key(self) -> tuple[float, int]:
        """The key of the first waiting request."""
        return self._queue.counter(self._queue.first_tenant()), self._queue.most_urgent

    def sampled(self, requests: Iterable[Request]) -> None:
        """Charges an output token for each."""
        for request in requests:
            self._queue.charge(request.source.tenant, OUTPUT_COST)

    def is_behind(self, other: Request, request: Request) -> bool:
        """Less urgent, of the same tenant: what tenants share they may wait for."""
        return other.source.tenant == request.source.tenant and super().is_behind(other, request)

    def stops_at(self, request: Request) -> bool:
        """What has no room for one tenant's request may have it for another's, in a slot of that one's own."""
        return False

    def pause(self, running: list[Request], waits: bool, step_id: int) -> list[Request]:
        """Nobody: shares decide."""
        return []

    def may_displace(self, running: Sequence[Request]) -> bool:
        """False when no tenant has one waiting that is more urgent than one of its own that runs."""
        for request in running:
            queue = self._queue.waiting_of(request.source.tenant)
            if queue is not None and queue.most_urgent < request.rank.urgency:
                return True
        return False

    def displaceable(self, running: Sequence[Request], urgent: Request, step_id: int) -> list[Request]:
        """Of the same tenant only."""
        own = [request for request in running if request.source.tenant == urgent.source.tenant]
        return super().displaceable(own, urgent, step_id)


def _input_cost(request: Request) -> float:
    return 0.0 if request.begun else INPUT_COST * request.num_prompt_tokens
