"""Policy: who goes first, and who gives way to whom. A lower priority number is more urgent, as in vLLM.

A request has the priority that it was sent with, and the urgency at which it stands: the same number, until its turn
by age (scheduler/queue.py) raises it. Blocks are taken from the least urgent. A slot is taken only for a request whose
own priority is ahead of the other's urgency: age never displaces. Where all priorities are equal this is first come,
first served, and nothing here is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evensong.scheduler.queue import WaitingQueue
from evensong.scheduler.request import Request

# A request that was displaced for a more urgent one is left alone for this many steps.
STEPS_BETWEEN_DISPLACEMENTS = 64
# Less urgent requests sit out one step in so many, at most.
STEPS_BETWEEN_PAUSES = 4


class Policy:
    """By priority, then by arrival. Another policy orders by other keys (scheduler/fairness.py)."""

    def __init__(self) -> None:
        self.waiting: WaitingQueue = WaitingQueue()
        self._last_pause = -STEPS_BETWEEN_PAUSES

    @property
    def plain(self) -> bool:
        """True while all requests that ever came are equal but for their arrival."""
        return not self.waiting.mixed

    def key(self, request: Request) -> Any:
        """Orders running requests: the one with the lowest goes first, the one with the highest gives way first."""
        return request.rank.urgency

    def first_key(self) -> Any:
        """What `key` is for the first waiting request; there must be one."""
        return self.waiting.most_urgent

    def sampled(self, requests: Iterable[Request]) -> None:
        """Each of these got a token in the step whose result was just applied."""

    def is_behind(self, other: Request, request: Request) -> bool:
        """True when `other` is less urgent than `request`, which therefore must not depend on it."""
        return other.rank.urgency > request.rank.urgency

    def gives_way(self, running: Sequence[Request]) -> Request:
        """Who loses its blocks when there are none left: the last by `key`, the newest among equals."""
        return max(reversed(running), key=self.key)

    def stops_at(self, request: Request) -> bool:
        """True when nobody behind `request`, which could not start, may start either."""
        return not self.waiting.is_aged(request)

    def may_displace(self, running: Sequence[Request]) -> bool:
        """False when it is plain that no waiting request may displace one of `running`."""
        if self.plain or not self.waiting or not running:
            return False
        return self.waiting.most_urgent < max(request.rank.urgency for request in running)

    def displaceable(self, running: Sequence[Request], urgent: Request, step_id: int) -> list[Request]:
        """Those of `running` that `urgent` may displace in step `step_id`: the last by urgency first, then the newest.

        One that was displaced before must have run since for as long, and until it gained a token: so each displacement
        has its price in progress, and nobody runs in vain for ever.
        """
        if self.plain or self.waiting.is_aged(urgent):
            return []
        victims = [r for r in reversed(running) if r.rank.urgency > urgent.rank.priority and _rested(r, step_id)]
        victims.sort(key=lambda request: -request.rank.urgency)
        return victims

    def order(self, running: list[Request], waits: bool, max_num_tokens: int) -> dict[str, int]:
        """Sorts `running` for a step of so many tokens; returns by request id how many each must leave for others.

        One for each request behind it, so that everybody goes on; and half of all tokens where one that goes before it
        waits and could start (`waits`), so that long prompts of others do not keep that one from its first. Nothing
        where all are equal, or the step cannot serve everybody anyway.
        """
        if self.plain or not 0 < len(running) <= max_num_tokens:
            return {}
        last = max(map(self.key, running))
        next_in = self.first_key() if waits and self.waiting else last
        if last == min(next_in, *map(self.key, running)):
            return {}
        running.sort(key=self.key)
        leave = {}
        for index, request in enumerate(running, 1):
            kept = max_num_tokens // 2 if next_in < self.key(request) else 0
            leave[request.request_id] = len(running) - index + kept
        return leave

    def pause(self, running: list[Request], waits: bool, step_id: int) -> list[Request]:
        """Takes out of `running` those that sit out step `step_id`, so that an urgent request's first step is short.

        They do if a more urgent one waits and could start (`waits`); if it does not, they are served after all.
        """
        if self.plain or not waits or not self.waiting or step_id - self._last_pause < STEPS_BETWEEN_PAUSES:
            return []
        first = self.waiting.most_urgent
        late = [request for request in running if request.rank.urgency > first]
        if late:
            self._last_pause = step_id
            running[:] = [request for request in running if request.rank.urgency <= first]
        return late


def _rested(request: Request, step_id: int) -> bool:
    if request.first_step_id == step_id:
        return False  # it starts in the very step
    if request.rank.displaced_step is None:
        return True
    rested = step_id - request.rank.displaced_step >= STEPS_BETWEEN_DISPLACEMENTS
    return rested and request.num_tokens > request.rank.displaced_tokens
