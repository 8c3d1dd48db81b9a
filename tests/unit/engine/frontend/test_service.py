"""Priority and time limit of a request: what is refused, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.engine.frontend.service import check_priority, check_timeout
from evensong.protocol.errors import RequestError


@pytest.mark.parametrize("priority", [None, True, 1.0, "1", 2**63, -(2**63) - 1, 10**4000])
def test_a_priority_that_is_no_int64_is_refused(priority: Any) -> None:
    with pytest.raises(RequestError, match="priority") as caught:
        check_priority(priority)
    assert (caught.value.status, caught.value.param) == (400, "priority")


@pytest.mark.parametrize("timeout", [True, "5", 0, -1, 0.0, float("nan"), float("inf"), 2e9, 10**400])
def test_a_timeout_that_is_no_time_is_refused(timeout: Any) -> None:
    with pytest.raises(RequestError, match="timeout") as caught:
        check_timeout(timeout)
    assert (caught.value.status, caught.value.param) == (400, "timeout")


def test_what_is_allowed() -> None:
    for priority in (0, -(2**63), 2**63 - 1):
        check_priority(priority)
    for timeout in (None, 1, 0.001, 1e9):
        check_timeout(timeout)
