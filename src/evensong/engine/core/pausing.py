"""Pause and sleep: the gate is closed, memory is given up, and all of it comes back with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evensong.engine.core.core import EngineCore, Outputs
from evensong.engine.core.gate import Standing
from evensong.protocol.control import PauseMode
from evensong.protocol.errors import RequestError
from evensong.protocol.output import FinishReason

KV_CACHE, WEIGHTS = "kv_cache", "weights"
CONFLICT = 409


@dataclass(frozen=True)
class Later:
    """The answer of a verb that must wait for steps: `finish()` gives it once `is_due()`."""

    is_due: Callable[[], bool]
    finish: Callable[[], Any]


class Pausing:
    """The verbs that close and open a core's gate."""

    def __init__(self, core: EngineCore, emit: Callable[[Outputs], None]) -> None:
        self._core = core
        self._emit = emit

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True, timeout: float | None = None) -> Any:
        """Closes the gate. Answered when nothing runs any more; new requests wait behind it."""

        def then() -> None:
            if clear_cache:
                self._forget()

        return self._close(mode, "pause", then)

    def resume(self) -> None:
        """Opens the gate."""
        self.check_awake("resume")
        self._core.gate.open()

    def is_paused(self) -> bool:
        """True while the gate is not open."""
        return self._core.gate.standing is not Standing.OPEN

    def sleep(self, level: int = 1, mode: PauseMode = "abort", timeout: float | None = None) -> Any:
        """Closes the gate; then memory is given up. Requests that were kept are computed again after wake_up."""
        return self._close(mode, "sleep", lambda: self._fall_asleep(level))

    def wake_up(self, tags: list[str] | None = None, timeout: float | None = None) -> None:
        """Takes memory back; the gate opens when all is there. Nothing to do for what is not asleep."""
        gate = self._core.gate
        woken = gate.asleep & set(tags or (KV_CACHE, WEIGHTS))
        # In this order: reading the weights needs the most memory while it lasts.
        for tag in sorted(woken, reverse=True):
            self._core.executor.collective_rpc("wake_up", args=(tag,))
            gate.asleep.discard(tag)
        if not gate.asleep:
            gate.open()

    def is_sleeping(self) -> bool:
        """True while memory is given up."""
        return bool(self._core.gate.asleep)

    def _close(self, mode: PauseMode, verb: str, then: Callable[[], None]) -> Any:
        gate, scheduler = self._core.gate, self._core.scheduler
        gate.close(Standing.DRAINING if mode == "wait" else Standing.SHUT)
        if mode == "abort":
            self._emit(self._core.finish_requests(self._core.request_ids(), FinishReason.ABORT))

        def finish() -> None:
            if gate.standing is Standing.OPEN or (mode == "wait" and scheduler.has_begun_requests()):
                # Another call came between.
                raise RequestError(
                    f"{verb}: the engine was resumed, or stopped, before its requests had finished", status=CONFLICT
                )
            gate.close(Standing.SHUT)
            # Steps of requests that have ended may be in flight, and write into memory that is given up next.
            self._emit(self._core.drain())
            then()

        if gate.standing is Standing.DRAINING and scheduler.has_begun_requests():
            return Later(lambda: not (gate.standing is Standing.DRAINING and scheduler.has_begun_requests()), finish)
        return finish()

    def _fall_asleep(self, level: int) -> None:
        if level == 0:
            return
        self._forget()
        parts = {KV_CACHE} if level == 1 else {KV_CACHE, WEIGHTS}
        for part in sorted(parts - self._core.gate.asleep):
            self._core.executor.collective_rpc("sleep", args=(part,))
            self._core.gate.fell_asleep(part)

    def _forget(self) -> None:
        """No block holds anything; what was kept is computed again."""
        self._core.scheduler.preempt_all()
        self._core.scheduler.reset_prefix_cache()

    def check_awake(self, verb: str) -> None:
        """Raises RequestError while memory is given up."""
        if self._core.gate.asleep:
            raise RequestError(f"{verb}: the engine sleeps; wake_up comes first", status=CONFLICT, code="asleep")
