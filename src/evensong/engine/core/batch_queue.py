"""BatchQueue: the steps of one core that are in flight, oldest first (spec A4)."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

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

    def __init__(self, executor: Executor, scheduler: Scheduler, progress: ProgressPage) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._progress = progress
        self._steps: deque[_Step] = deque()
        self._size = executor.max_concurrent_batches
        # What is being handed in or waited for: the note that is left when that fails.
        self.current_plan: SchedulerOutput | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def fill(self) -> None:
        """Plans steps and hands them in, until there is no room, or nothing to plan.

        The masks of constrained rows depend on all tokens before. Where results of steps in flight name some of those,
        the draw is handed in by `sample_waiting`, and nothing is planned behind the step until then.
        """
        while len(self._steps) < self._size and (not self._steps or self._steps[-1].output is not None):
            plan = self._scheduler.schedule()
            if not plan.num_scheduled_tokens:
                return
            self.current_plan = plan
            if not self._steps:
                self._progress.step_begins(plan.total_num_scheduled_tokens)
            self._steps.append(_Step(plan, self._executor.execute_model(plan)))
            self.sample_waiting()
            self.current_plan = None

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
        return step.plan, step.output.result()

    def done(self) -> None:
        """The result that was taken is applied."""
        self._steps.popleft()
        self.current_plan = None
        self._progress.step_done()
        if self._steps:
            self._progress.step_begins(self._steps[0].plan.total_num_scheduled_tokens)
        self.sample_waiting()
