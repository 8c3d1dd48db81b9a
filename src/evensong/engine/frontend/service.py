"""What a request may ask of the scheduler beside its tokens: a priority and a time limit."""

from __future__ import annotations

import math

from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import INT64_MAX, INT64_MIN


def check_priority(priority: object) -> None:
    """Raises RequestError unless `priority` is an int64; lower is sooner."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be an integer, got {priority!r:.60}", param="priority")
    if not INT64_MIN <= priority <= INT64_MAX:
        raise RequestError("priority must fit in 64 bits", param="priority")


def check_timeout(timeout: object) -> None:
    """Raises RequestError unless `timeout` is None or a positive number of seconds."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise RequestError(f"timeout must be a number of seconds, got {timeout!r:.60}", param="timeout")
    if not 0 < timeout <= 1e9 or not math.isfinite(timeout):
        shown = timeout if abs(timeout) < 1e300 else "a number of hundreds of digits"
        raise RequestError(f"timeout must be above 0 and at most 1e9 seconds, got {shown}", param="timeout")
