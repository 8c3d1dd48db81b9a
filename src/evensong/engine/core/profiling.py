"""Profiling of one replica: all ranks' parts and the core's own spans become one trace."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evensong.executor.base import Executor
from evensong.observe.chrome_trace import CORE, CORE_PROCESS, STEPS_THREAD, PartWriter, merge_parts
from evensong.protocol.errors import RequestError
from evensong.protocol.step import SchedulerOutput
from evensong.scheduler.scheduler import Scheduler

CONFLICT = 409
TITLE = "core-0"
# Spans that are kept, of 40 bytes each: three a step.
MOST_SPANS = 1_000_000
_NAMES = ("schedule", "execute", "update")
_COLUMNS = 5


class CoreSpans:
    """What the core does in each step: the plan is made, handed to the workers, and their tokens are taken.

    The three methods are replaced on the objects themselves, so that nothing is in a step's way while none is attached.
    """

    def __init__(self) -> None:
        # Name, begin and end in ns, step id and number of tokens, one after the other.
        self._flat = array("q")
        self._replaced: list[tuple[Any, str, Any]] = []

    def attach(self, scheduler: Scheduler, executor: Executor) -> None:
        """Begins to note."""
        self._replace(scheduler, "schedule", lambda args, plan: plan)
        self._replace(executor, "execute_model", lambda args, result: args[0])
        self._replace(scheduler, "update_from_output", lambda args, result: args[0])

    def detach(self) -> None:
        """Ends it; safe to call twice."""
        for owner, name, own in self._replaced:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._replaced.clear()

    def write(self, writer: PartWriter) -> None:
        """The spans as events."""
        writer.name_thread(STEPS_THREAD, "step loop")
        if len(self._flat) >= MOST_SPANS * _COLUMNS:
            writer.label("spans cut off: the profile took too long")
        for first in range(0, len(self._flat), _COLUMNS):
            name, begin, end, step_id, num_tokens = self._flat[first : first + _COLUMNS]
            args = f'{{"step_id":{step_id},"num_tokens":{num_tokens}}}'
            writer.span(CORE, _NAMES[name], STEPS_THREAD, begin, end, args)

    def _replace(self, owner: Any, name: str, plan_of: Callable[[tuple[Any, ...], Any], SchedulerOutput]) -> None:
        call, number = getattr(owner, name), len(self._replaced)

        def timed(*args: Any) -> Any:
            begin = time.monotonic_ns()
            result = call(*args)
            end = time.monotonic_ns()
            plan = plan_of(args, result)
            if len(self._flat) < MOST_SPANS * _COLUMNS:
                self._flat.extend((number, begin, end, plan.step_id, plan.total_num_scheduled_tokens))
            return result

        # Seldom anything: an instance has its class's methods.
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, timed)


class Profiling:
    """Used between steps, by the core's thread."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._spans = CoreSpans()
        self._parts: list[Path] = []

    def start(self, prefix: str | None) -> None:
        """On every rank. Raises RequestError where one cannot; then none runs."""
        if self._parts:
            raise RequestError("the profiler runs already", status=CONFLICT)
        try:
            parts = self._executor.collective_rpc("profile", args=("start", prefix))
        except BaseException:
            self._drop()
            raise
        self._parts = [Path(part) for part in parts]
        self._spans = CoreSpans()
        self._spans.attach(self._scheduler, self._executor)

    def stop(self) -> list[str]:
        """The path of the trace, as the only item. Raises RequestError: nothing runs, or it cannot be written."""
        if not self._parts:
            raise RequestError("the profiler does not run", status=CONFLICT)
        parts, self._parts = self._parts, []
        self._spans.detach()
        # Named after the first rank's part, whose name tells prefix and time.
        stem = parts[0].name.rpartition(".rank")[0]
        own, trace = parts[0].with_name(f"{stem}.core.part"), parts[0].with_name(f"{stem}.pt.trace.json.gz")
        try:
            self._executor.collective_rpc("profile", args=("stop",))
            with PartWriter(own, CORE_PROCESS, TITLE) as writer:
                self._spans.write(writer)
            merge_parts(trace, [own, *parts])
        except OSError as error:
            raise RequestError(f"the trace cannot be written: {error}", status=CONFLICT) from error
        finally:
            self._spans = CoreSpans()
            self._drop()
            for part in (own, *parts):
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
        return [str(trace)]

    def _drop(self) -> None:
        # Where some ranks do what others cannot; a dead executor has told its reason already.
        with contextlib.suppress(Exception):
            self._executor.collective_rpc("profile", args=("drop",))
