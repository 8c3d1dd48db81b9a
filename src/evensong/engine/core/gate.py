"""Gate: whether steps run and which requests may start. Open, unless a control verb closed it."""

from __future__ import annotations

from enum import Enum

from evensong.scheduler.request import Request
from evensong.scheduler.scheduler import Scheduler
from evensong.utils.progress import CoreState, ProgressPage


class Standing(Enum):
    """What a closed gate lets through."""

    OPEN = "open"
    # Requests that have begun finish; new ones wait.
    DRAINING = "draining"
    SHUT = "shut"


class Gate:
    """Changed by Control only. `asleep` names what was given up and is not back: it cannot open before.

    How it stands is published on the core's progress page.
    """

    def __init__(self, scheduler: Scheduler, progress: ProgressPage) -> None:
        self.standing = Standing.OPEN
        self.asleep: set[str] = set()
        self._scheduler = scheduler
        self._progress = progress
        scheduler.may_start = self._may_start

    def has_work(self) -> bool:
        """True when a step would compute something."""
        if self.standing is Standing.OPEN:
            return self._scheduler.has_requests()
        return self.standing is Standing.DRAINING and self._scheduler.has_begun_requests()

    def close(self, standing: Standing) -> None:
        """Lets less through; what is asleep stays shut."""
        self.standing = Standing.SHUT if self.asleep else standing
        self._progress.set_state(CoreState.ASLEEP if self.asleep else CoreState.PAUSED)

    def fell_asleep(self, part: str) -> None:
        """`part` was given up."""
        self.asleep.add(part)
        self.close(Standing.SHUT)

    def open(self) -> None:
        """Everything goes on."""
        assert not self.asleep
        self.standing = Standing.OPEN
        self._progress.set_state(CoreState.OPEN)

    def _may_start(self, request: Request) -> bool:
        return self.standing is Standing.OPEN or request.begun
