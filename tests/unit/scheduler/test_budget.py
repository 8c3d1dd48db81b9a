"""Shares of a step."""

from __future__ import annotations

import pytest

from evensong.scheduler.budget import Budget, SchedulerLimits


@pytest.mark.parametrize(
    ("chunked", "threshold", "wanted", "share"),
    [(True, 0, 4, 4), (True, 0, 40, 10), (True, 3, 40, 3), (True, 30, 40, 10), (False, 0, 10, 10), (False, 0, 11, 0)],
)
def test_shares(chunked: bool, threshold: int, wanted: int, share: int) -> None:
    assert Budget(SchedulerLimits(1, 10, 100, chunked, threshold)).share(wanted) == share


def test_what_is_taken_is_gone_until_given_back() -> None:
    budget = Budget(SchedulerLimits(1, 10, 100))
    budget.take(10)
    assert budget.share(1) == 0
    budget.take(-4)
    assert budget.share(9) == 4
    with pytest.raises(AssertionError):
        budget.take(5)
