"""SteppingWorker: the verbs of a step, which plans and results go through; worker/worker.py has the rest."""

from __future__ import annotations

from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.worker.device import Device
from evensong.worker.runner import Runner


class SteppingWorker:
    """Plans go in ahead of results: `execute_model` and `sample_tokens` for each, and `take_output` in the same order.

    A subclass makes the device, and the runner once the KV cache is there.
    """

    _device: Device
    _runner: Runner | None = None

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Starts the forward pass of a plan. May wait for steps before it, and does where the device runs them here."""
        self._require_runner().execute(plan)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> None:
        """Hands in the sampling of the plan that was started last; of constrained rows, what `bitmask` allows."""
        self._require_runner().sample(bitmask)

    def take_output(self) -> ModelOutput | None:
        """Waits for the oldest step in flight; None on ranks that sample nothing. Raises what the step raised."""
        return self._require_runner().take()

    def output_ready(self) -> bool:
        """Whether `take_output` would return at once; False while nothing is in flight."""
        return self._runner is not None and self._runner.output_ready()

    @property
    def num_in_flight(self) -> int:
        """Steps that were started and not taken."""
        return 0 if self._runner is None else self._runner.num_in_flight

    def set_doorbell(self, fd: int) -> None:
        """An eventfd that grows whenever a step in flight has run."""
        self._device.set_doorbell(fd)

    def _require_runner(self) -> Runner:
        assert self._runner is not None, "initialize_from_config comes first"
        return self._runner
