"""Order of the waiting queue."""

from __future__ import annotations

import pytest

from evensong.scheduler.queue import WaitingQueue
from evensong.scheduler.request import Request
from tests.unit.scheduler.driving import ask


def test_preempted_then_resumed_then_new_each_in_order() -> None:
    queue = WaitingQueue()
    new = [Request(ask(f"n{i}", [1])) for i in range(2)]
    resumed = [Request(ask(f"r{i}", [1], attempt=1)) for i in range(2)]
    for request in (new[0], resumed[0], new[1], resumed[1]):
        queue.append(request)
    preempted = [Request(ask(f"p{i}", [1])) for i in range(2)]
    for request in reversed(preempted):  # the newest loses its slot first
        queue.push_front(request)
    assert list(queue) == preempted + resumed + new and len(queue) == 6
    queue.remove(resumed[0])
    queue.remove(new[1])
    queue.remove(preempted[0])
    assert list(queue) == [preempted[1], resumed[1], new[0]]
    with pytest.raises(AssertionError, match="does not wait"):
        queue.remove(new[1])
