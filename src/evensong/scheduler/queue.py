"""WaitingQueue: the most urgent first, then first come, first served; those that come back go ahead of their equals.

So that nothing starves, age counts too: after MAX_OVERTAKES slots went to requests that came later than one that is
less urgent, the next free slot is for the longest waiting request that has waited AGE_STEPS steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from evensong.scheduler.request import Request

AGE_STEPS = 64
MAX_OVERTAKES = 3


class _Level:
    """The waiting requests of one urgency."""

    __slots__ = ("new", "returning")

    def __init__(self) -> None:
        self.returning: deque[Request] = deque()
        self.new: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        yield from self.returning
        yield from self.new

    def first(self) -> Request:
        return self.returning[0] if self.returning else self.new[0]

    def remove(self, request: Request) -> None:
        for queue in (self.returning, self.new):
            if queue and queue[0] is request:
                queue.popleft()
                return
        for queue in (self.returning, self.new):
            try:
                queue.remove(request)
                return
            except ValueError:
                continue
        raise AssertionError(f"request {request.request_id} does not wait")


class WaitingQueue:
    """Requests that hold no slot, in the order in which they get one. With one urgency it is a plain queue.

    `mixed` is False while every request that ever came had the same urgency: then nobody can displace anybody.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._count = 0
        self._num_tokens = 0
        self._first_urgency: int | None = None
        self.mixed = False
        self._num_overtakes = 0
        self._aged: Request | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for urgency in self._order:
            yield from self._levels[urgency]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests that wait."""
        return self._num_tokens

    @property
    def most_urgent(self) -> int:
        """The urgency of the first request; the queue must not be empty."""
        return self._order[0]

    def append(self, request: Request) -> None:
        """A request that arrives: behind those of its kind."""
        level = self._level(request.rank.urgency)
        (level.returning if request.resumed else level.new).append(request)
        self._count += 1
        self._num_tokens += request.num_tokens

    def push_front(self, request: Request) -> None:
        """A preempted request: before every other of its urgency."""
        self._level(request.rank.urgency).returning.appendleft(request)
        self._count += 1
        self._num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        level = self._levels.get(request.rank.urgency)
        assert level is not None, f"request {request.request_id} does not wait"
        level.remove(request)
        self._count -= 1
        self._num_tokens -= request.num_tokens
        if request is self._aged:
            self._aged = None
        if not level.returning and not level.new:
            del self._levels[request.rank.urgency]
            self._order.remove(request.rank.urgency)

    def candidates(self, step_id: int) -> Iterable[Request]:
        """Everyone in the order in which slots are given in step `step_id`."""
        order = list(self)
        self._aged = self._whose_turn(step_id)
        if self._aged is not None:
            order.remove(self._aged)
            order.insert(0, self._aged)
        return order

    def is_aged(self, request: Request) -> bool:
        """True for the candidate that stands first by its age alone."""
        return request is self._aged

    def start(self, request: Request) -> int:
        """Takes out a request that gets a slot; returns the urgency at which it stands from now on."""
        urgency = request.rank.urgency
        if request is self._aged:
            # It is one of those who went ahead of it; else the next of them would send it back.
            urgency = self.most_urgent
            self._aged, self._num_overtakes = None, 0
        self.remove(request)
        if any(
            self._levels[other].first().rank.arrival < request.rank.arrival for other in self._order if other > urgency
        ):
            self._num_overtakes += 1
        return urgency

    def _whose_turn(self, step_id: int) -> Request | None:
        if self._num_overtakes < MAX_OVERTAKES:
            return None
        waiting = [self._levels[urgency].first() for urgency in self._order[1:]]
        aged = [request for request in waiting if step_id - request.rank.waiting_since >= AGE_STEPS]
        return min(aged, key=lambda request: request.rank.arrival, default=None)

    def _level(self, urgency: int) -> _Level:
        level = self._levels.get(urgency)
        if level is None:
            if self._first_urgency is None:
                self._first_urgency = urgency
            self.mixed |= urgency != self._first_urgency
            level = self._levels[urgency] = _Level()
            insort(self._order, urgency)
        return level
