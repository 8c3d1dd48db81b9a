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
