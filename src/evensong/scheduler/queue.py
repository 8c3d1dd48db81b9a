"""WaitingQueue: first come, first served; requests that come back go ahead of new ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from evensong.scheduler.request import Request


class WaitingQueue:
    """Requests that hold no slot, in the order in which they get one."""

    def __init__(self) -> None:
        self._returning: deque[Request] = deque()
        self._new: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._returning) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returning
        yield from self._new

    def append(self, request: Request) -> None:
        """A request that arrives: behind those of its kind."""
        (self._returning if request.resumed else self._new).append(request)

    def push_front(self, request: Request) -> None:
        """A preempted request: before every other."""
        self._returning.appendleft(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        for queue in (self._returning, self._new):
            if queue and queue[0] is request:
                queue.popleft()
                return
        for queue in (self._returning, self._new):
            try:
                queue.remove(request)
                return
            except ValueError:
                continue
        raise AssertionError(f"request {request.request_id} does not wait")
