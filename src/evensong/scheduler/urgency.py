"""Who gives way to whom. A lower number is more urgent (vLLM's `priority`).

A request has the priority that it was sent with, and the urgency at which it stands: the same number, until its turn
by age (scheduler/queue.py) raises it. Blocks are taken from the least urgent. A slot is taken only for a request whose
own priority is ahead of the other's urgency: age never displaces.
"""

from __future__ import annotations

from collections.abc import Sequence

from evensong.scheduler.request import Request

# A request that was displaced for a more urgent one is left alone for this many steps.
STEPS_BETWEEN_DISPLACEMENTS = 64


def least_urgent(running: Sequence[Request]) -> Request:
    """Who gives up its blocks when there are none: the least urgent of `running`, the newest among equals."""
    return max(reversed(running), key=lambda request: request.rank.urgency)


def in_order_of_urgency(running: list[Request], most_urgent_waiting: int | None, max_num_tokens: int) -> dict[str, int]:
    """Sorts `running` for a step of `max_num_tokens` tokens; returns by request id how many each must leave for others.

    One for each request behind it, so that everybody goes on; and half of all tokens where one that is more urgent
    waits, so that long prompts of others do not keep it from its first. Nothing where all are equally urgent, or the
    step cannot serve everybody anyway.
    """
    least = max((request.rank.urgency for request in running), default=0)
    first = min((request.rank.urgency for request in running), default=0)
    first = first if most_urgent_waiting is None else min(first, most_urgent_waiting)
    if first == least or max_num_tokens < len(running):
        return {}
    running.sort(key=lambda request: request.rank.urgency)
    leave = {}
    for index, request in enumerate(running, 1):
        waits = most_urgent_waiting is not None and most_urgent_waiting < request.rank.urgency
        leave[request.request_id] = len(running) - index + (max_num_tokens // 2 if waits else 0)
    return leave


def displaceable(running: Sequence[Request], urgent: Request, step_id: int) -> list[Request]:
    """Those of `running` that `urgent` may displace in step `step_id`, least urgent first, newest first among equals.

    One that was displaced before must have run since for as long, and until it gained a token: so each displacement
    has its price in progress, and nobody runs in vain for ever.
    """
    victims = [r for r in reversed(running) if r.rank.urgency > urgent.rank.priority and _may_be_displaced(r, step_id)]
    victims.sort(key=lambda request: -request.rank.urgency)
    return victims


def _may_be_displaced(request: Request, step_id: int) -> bool:
    if request.first_step_id == step_id:
        return False  # it starts in the very step
    if request.rank.displaced_step is None:
        return True
    rested = step_id - request.rank.displaced_step >= STEPS_BETWEEN_DISPLACEMENTS
    return rested and request.num_tokens > request.rank.displaced_tokens
