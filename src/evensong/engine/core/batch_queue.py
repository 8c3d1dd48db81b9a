"""BatchQueue: the steps of one core that are in flight, oldest first (spec A4)."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from evensong.engine.core.pacing import NoPacing
from evensong.executor.base import Executor
from evensong.protocol.step import ModelOutput, SchedulerOutput
from evensong.scheduler.scheduler import Scheduler
from evensong.utils.progress import ProgressPage


@dataclass
class _Step:
    """`output` is None while the step waits for its masks."""

    plan: SchedulerOutput
    forward: Future[None]
    output: Future[ModelOutput] | None = None


class BatchQueue:
    """Plans go in at one end while there is room, results come out at the other. Used by the core's thread.

    With room for one it is the plain loop: plan, execute, sample, wait.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, progress: ProgressPage, num_stages: int = 1) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._progress = progress
        self._steps: deque[_Step] = deque()
        self._size = executor.max_concurrent_batches
        # One step runs, whole, while one more is planned.
        self.runs_one_ahead = num_stages == 1 and self._size == 2
        self.pacing = NoPacing()
        # What is being handed in or waited for: the note that is left when that fails.
        self.current_plan: SchedulerOutput | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def seconds_left(self) -> float:
        """How long the core may listen before it plans; 0: not at all."""
        return self.pacing.seconds_left() if len(self._steps) == 1 else 0.0

    def fill(self) -> bool:
        """Plans steps and hands them in, until there is no room or nothing to plan; False: the next one is not due.

        The masks of constrained rows depend on all tokens before. Where results of steps in flight name some of those,
        the draw is handed in by `sample_waiting`, and nothing is planned behind the step until then.
        """
        while len(self._steps) < self._size and (not self._steps or self._steps[-1].output is not None):
            if self.seconds_left() > 0.0:
                return False
            began = time.monotonic()
            plan = self._scheduler.schedule()
            if not plan.num_scheduled_tokens:
                return True
            self.current_plan = plan
            if not self._steps:
                self._begins(plan)
            elif self._is_done(self._steps[0]):
                self.pacing.late()
            self._steps.append(_Step(plan, self._executor.execute_model(plan)))
            self.sample_waiting()
            self.current_plan = None
            self.pacing.planned(time.monotonic() - began)
        return True

    def sample_waiting(self) -> None:
        """Hands in the draw of the step that was planned last, if it waited for its masks and they can be told."""
        step = self._steps[-1] if self._steps else None
        if step is not None and step.output is None and self._scheduler.knows_masks(step.plan):
            bitmask = self._scheduler.get_grammar_bitmask(step.plan) if step.plan.awaits_bitmask else None
            step.output = self._executor.sample_tokens(bitmask)

    def take(self) -> tuple[SchedulerOutput, ModelOutput]:
        """Waits for the oldest step, which must exist. Raises what its workers raised; its plan is `current_plan` then.

        The step counts as in flight until `done`.
        """
        step = self._steps[0]
        self.current_plan = step.plan
        assert step.output is not None, "the oldest step has no result before it that its masks could wait for"
        step.forward.result()
        output = step.output.result()
        self.pacing.ends()
        return step.plan, output

    def done(self) -> None:
        """The result that was taken is applied."""
        self._steps.popleft()
        self.current_plan = None
        self._progress.step_done()
        if self._steps:
            self._begins(self._steps[0].plan)
        self.sample_waiting()

    def _begins(self, plan: SchedulerOutput) -> None:
        num_tokens = plan.total_num_scheduled_tokens
        self._progress.step_begins(num_tokens)
        self.pacing.begins(num_tokens)

    @staticmethod
    def _is_done(step: _Step) -> bool:
        return step.output is not None and step.output.done()
