"""UniProcExecutor: the one worker runs inside the core's process, in a thread of its own.

The thread exists so that `execute_model` returns at once: the core plans the next step, computes bitmasks and its IO
threads work while the model runs (torch frees the GIL); steps that are handed in early wait in the thread's queue. A
worker whose steps run elsewhere anyway, as those of the native engine do, is called from the core's thread: each hop
between threads costs a step some 50 us. The worker class is loaded by name, so that torch arrives only where it
computes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from evensong.config.sections import EngineConfig
from evensong.executor.base import Executor, FailureCallback
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.utils.progress import ProgressPage

Result = TypeVar("Result")

WORKER_CLASS = "evensong.worker.worker:Worker"

# How long torch's OpenMP threads spin before they sleep, in turns of some nanoseconds each. Asleep at once they cost
# 50 us for each product, which halves the speed of small steps; spinning for long they keep the very thread that they
# wait for from running wherever other processes want the same cores, and a step takes 100 times as long (both measured
# on two cores). This many turns outlast the gaps within a layer and little more.
SPIN_TURNS = "10000"
_OPENMP_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Sets how torch's threads wait, unless the user has. Takes effect only before torch is first imported."""
    if not any(name in os.environ for name in _OPENMP_WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPIN_TURNS


class _WhenAsked(Future[Result]):
    """A future whose call is made by whoever asks for the result first, in that thread.

    `ready`: whether the call would return at once, for the oldest of several that are asked for in order.
    """

    def __init__(self, call: Callable[[], Result], ready: Callable[[], bool] = bool) -> None:
        super().__init__()
        self._call = call
        self._ready = ready

    def done(self) -> bool:
        return super().done() or self._ready()

    def result(self, timeout: float | None = None) -> Result:
        if not super().done():
            try:
                self.set_result(self._call())
            except BaseException as error:
                self.set_exception(error)
        return super().result(timeout)


class UniProcExecutor(Executor):
    """One worker, one thread. Construction loads the model; raises what the worker raises."""

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._callbacks: list[FailureCallback] = []
        self._closed = False
        limit_spinning()
        module, _, name = worker_class.partition(":")
        try:
            self._worker: Any = self._run(lambda: getattr(importlib.import_module(module), name)(config))
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._steps_here = bool(getattr(self._worker, "steps_run_elsewhere", False))
        self._num_batches = 1 + config.scheduler.async_scheduling

    def _run(self, call: Callable[[], Any]) -> Any:
        return self._thread.submit(call).result()

    def get_kv_cache_specs(self) -> list[list[LayerKVSpec]]:
        return [self._run(self._worker.get_kv_cache_specs)]

    def determine_available_memory(self) -> list[int]:
        return [int(self._run(self._worker.determine_available_memory))]

    def get_model_limits(self) -> ModelLimits:
        limits: ModelLimits = self._run(self._worker.get_model_limits)
        return limits

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        self._run(lambda: self._worker.initialize_from_config(kv_cache, max_model_len))

    def measure_token_rate(self) -> float:
        return float(self._run(self._worker.measure_token_rate))

    def describe(self) -> dict[str, str]:
        parts: dict[str, str] = self._run(self._worker.describe)
        return parts

    @property
    def max_concurrent_batches(self) -> int:
        return self._num_batches

    def execute_model(self, plan: SchedulerOutput) -> Future[None]:
        if not self._steps_here:
            return self._thread.submit(self._worker.execute_model, plan)
        started: Future[None] = _WhenAsked(lambda: self._worker.execute_model(plan))
        # At once, so that the model runs; what it raises is the future's, as from the thread.
        with contextlib.suppress(Exception):
            started.result()
        return started

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelOutput]:
        if not self._steps_here:
            return self._thread.submit(self._sampled, bitmask)
        # Handed in at once too; whoever asks first waits for the step, in that thread.
        try:
            self._worker.sample_tokens(bitmask)
        except Exception as error:
            failed: Future[ModelOutput] = Future()
            failed.set_exception(error)
            return failed
        return _WhenAsked(self._worker.take_output, self._worker.output_ready)

    def _sampled(self, bitmask: GrammarBitmask | None) -> ModelOutput:
        self._worker.sample_tokens(bitmask)
        output: ModelOutput = self._worker.take_output()
        return output

    def use_idle_time(self) -> bool:
        return bool(self._run(self._worker.use_idle_time))

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        call = None if method.startswith("_") else getattr(self._worker, method, None)
        if not callable(call):
            raise AttributeError(f"the worker has no method {method!r}")
        return [self._thread.submit(call, *args).result(timeout)]

    def watch_progress(self, page: ProgressPage) -> None:
        self._run(lambda: self._worker.watch_progress(page))

    def register_failure_callback(self, callback: FailureCallback) -> None:
        # The worker lives and dies with this process: a step that fails says so through its future.
        self._callbacks.append(callback)

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._worker = None  # frees the weights and the KV cache
