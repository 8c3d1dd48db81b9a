"""Deadlines: requests that are over their time end with what they have, and their blocks are free at once."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from evensong.scheduler.request import Request, RequestStatus

# What the last output names as its stop_reason: the whole time is over, or the time in which to get a first slot.
TIMEOUT = "timeout"
QUEUE_TIMEOUT = "queue_timeout"
_SPARE_ENTRIES = 64


class Deadlines:
    """Looked at before every step. Where nobody set a limit it holds nothing and asks no clock.

    `request_timeout` bounds a request's whole life, `queue_timeout` the wait for its first slot; both are in seconds
    from its arrival, None for no limit. A request's own `timeout` can only be shorter.
    """

    def __init__(
        self,
        request_timeout: float | None = None,
        queue_timeout: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request_timeout = request_timeout
        self._queue_timeout = queue_timeout
        self._clock = clock
        # (when, number, request, stop_reason): numbers keep requests from being compared.
        self._heap: list[tuple[float, int, Request, str]] = []
        self._number = 0

    def watch(self, request: Request) -> None:
        """From now on the request's time runs; what it spent since its arrival counts."""
        source = request.source
        limits = [limit for limit in (source.timeout or None, self._request_timeout) if limit is not None]
        if not limits and self._queue_timeout is None:
            return
        # Clocks of two processes meet here once: what the wall clock does later changes nothing.
        spent = max(time.time() - source.arrival_time, 0.0) if source.arrival_time else 0.0
        began = self._clock() - spent
        if limits:
            self._push(began + min(limits), request, TIMEOUT)
        if self._queue_timeout is not None:
            self._push(began + self._queue_timeout, request, QUEUE_TIMEOUT)

    def overdue(self) -> list[tuple[str, str]]:
        """Request id and stop_reason of those whose time is over; each is named once."""
        if not self._heap:
            return []
        now = self._clock()
        over: dict[str, str] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, request, reason = heapq.heappop(self._heap)
            if request.status is not RequestStatus.FINISHED and not (request.begun and reason == QUEUE_TIMEOUT):
                over.setdefault(request.request_id, reason)
        return list(over.items())

    def seconds_left(self) -> float | None:
        """Until the next look is due; None where there is nothing to look at."""
        return max(self._heap[0][0] - self._clock(), 0.0) if self._heap else None

    def _push(self, when: float, request: Request, reason: str) -> None:
        if len(self._heap) > _SPARE_ENTRIES and self._number % _SPARE_ENTRIES == 0:
            # Requests that ended in time leave entries behind: those go now and then.
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, request, reason))
