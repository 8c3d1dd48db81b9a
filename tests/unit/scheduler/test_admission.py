"""The queue's limits: what counts as queued, who may always wait, and when a refused client should come back."""

from __future__ import annotations

import pytest

from evensong.protocol.errors import RequestError
from evensong.scheduler.admission import MAX_RETRY_SECONDS, PACE_STARTS, Pace
from evensong.scheduler.fairness import FairShare
from evensong.scheduler.policy import Policy
from tests.unit.scheduler.driving import Driven, ask


def admitted(driven: Driven, lengths: list[int]) -> list[bool]:
    """Which of several requests, all sent before the next step, are taken."""
    taken = []
    for n, length in enumerate(lengths):
        try:
            driven.scheduler.add_request(ask(f"r{len(driven.scheduler.requests)}-{n}", [n + 1] * length))
            taken.append(True)
        except RequestError as error:
            assert (error.status, error.code, error.type) == (429, "queue_full", "rate_limit_error")
            assert error.retry_after is not None and error.retry_after >= 1
            taken.append(False)
    return taken


@pytest.mark.parametrize("policy", [Policy, lambda: FairShare({})])
def test_tokens_in_the_queue_are_limited_beside_requests(policy: type[Policy]) -> None:
    driven = Driven(max_num_seqs=2, max_num_queued_tokens=20, max_num_queued_reqs=4, policy=policy())
    # Two have a slot, the third is the first that waits, the fourth fits beside it, the fifth does not, the sixth does.
    assert admitted(driven, [50, 50, 10, 8, 3, 2]) == [True, True, True, True, False, True]
    driven.step()
    # Nothing changed when the first two got their slots: it is the same whether a step came between or not.
    assert admitted(driven, [1]) == [False]


def test_the_first_that_waits_may_be_longer_than_the_limit() -> None:
    driven = Driven(max_num_seqs=1, max_num_queued_tokens=20)
    assert admitted(driven, [4, 60, 1]) == [True, True, False]


def test_resumed_requests_are_taken_beyond_both_limits() -> None:
    driven = Driven(max_num_seqs=1, max_num_queued_tokens=5, max_num_queued_reqs=1)
    assert admitted(driven, [4, 4, 4]) == [True, True, False]
    driven.scheduler.add_request(ask("resumed", [1] * 10, attempt=1))


def test_what_leaves_the_queue_makes_room() -> None:
    driven = Driven(max_num_seqs=1, max_num_queued_tokens=20)
    assert admitted(driven, [4, 15, 10]) == [True, True, False]
    driven.run()
    assert driven.scheduler.waiting.num_tokens == 0
    assert admitted(driven, [4, 15, 5]) == [True, True, True]


def test_the_pace_tells_when_to_come_back() -> None:
    now = 100.0
    pace = Pace(clock=lambda: now)
    assert pace.seconds_for(50) == 1
    for _ in range(2 * PACE_STARTS):
        pace.started(True)
        now += 2.0
    # One start in two seconds, and the last one is two seconds ago.
    assert pace.seconds_for(1) == 3 and pace.seconds_for(10) == 21
    assert pace.seconds_for(10**6) == MAX_RETRY_SECONDS
    now += 1000  # nothing has started since: the estimate grows with it
    assert pace.seconds_for(1) > 30
    pace.started(False)  # the queue is empty: what comes next is measured anew
    assert pace.seconds_for(50) == 1
