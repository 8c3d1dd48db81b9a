"""Executor: what a core sees of its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.utils.progress import ProgressPage

FailureCallback = Callable[[str], None]


class Executor(ABC):
    """Runs the same verbs on every rank. Construction starts the workers and loads the weights.

    Every step calls `execute_model` and then `sample_tokens`, once each, in this order, before the next step does;
    neither waits for the step. So up to `max_concurrent_batches` steps are in flight, whose results are asked for in
    order. Steps run in order too: a plan may name tokens that a step before it samples, without knowing them. When a
    step fails, the futures of all that are in flight do.
    """

    @abstractmethod
    def get_kv_cache_specs(self) -> list[list[LayerKVSpec]]:
        """What each rank keeps per token, in each attention layer that it has."""

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Bytes that the KV cache may take on each rank."""

    @abstractmethod
    def get_model_limits(self) -> ModelLimits:
        """What the loaded model itself sets."""

    @abstractmethod
    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache and warms up."""

    @abstractmethod
    def measure_token_rate(self) -> float:
        """Tokens per second of a forward pass of a full chunk, measured after the KV cache was allocated."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """The fingerprint parts that the ranks know: weights, numeric mode, dtypes, kernels (all ranks agree)."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Future[None]:
        """Starts the forward pass of `plan`."""

    @abstractmethod
    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelOutput]:
        """Samples after the forward pass that was started last. None where no row has a mask."""

    @abstractmethod
    def use_idle_time(self) -> bool:
        """Waits for some milliseconds of work that makes later steps faster; False when nothing is left to do."""

    @abstractmethod
    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls a public worker method by name on every rank; one result per rank, in rank order.

        Raises AttributeError for an unknown name, TimeoutError, or what the method raised.
        """

    @abstractmethod
    def watch_progress(self, page: ProgressPage) -> None:
        """`page` moves forward whenever a step does: at least once for each layer."""

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """`callback(reason)` is called once, from any thread, when a worker can no longer run."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they hold; safe to call twice."""

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once: one for each pipeline stage, and one more to plan a step ahead."""
        return 1
