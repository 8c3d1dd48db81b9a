"""MultiprocExecutor: one worker process a rank (executor/rank_group.py). Plans go to all, the output rank answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from evensong.config.sections import EngineConfig
from evensong.executor.base import Executor, FailureCallback
from evensong.executor.rank_group import RankGroup
from evensong.executor.uniproc import WORKER_CLASS
from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.ranks import Call, Reply, ToRanks, error_of
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.utils.progress import ProgressPage

Value = TypeVar("Value")

# Fingerprint parts that come of a rank's own layers and processors; of all others every rank says the same.
OF_EACH_RANK = ("trial_results", "threads")


class _Output(Future[ModelOutput]):
    """The output of a step, read by whoever asks for it, in that thread; outputs come in the order of the steps."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        super().__init__()
        self._executor = executor

    def done(self) -> bool:
        self._executor.read_outputs(0.0, self)
        return super().done()

    def result(self, timeout: float | None = None) -> ModelOutput:
        if not super().done() and not self._executor.read_outputs(timeout, self):
            raise TimeoutError
        return super().result(0)

    def is_settled(self) -> bool:
        """`done` without reading."""
        return super().done()


class MultiprocExecutor(Executor):
    """Construction starts the workers, which load their weights beside each other.

    Raises what a rank raises (its number before it where there are several), and ConfigError where ranks have no place
    or do not hold the same model. All calls are for one thread.
    """

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS, replica: int = 0) -> None:
        self._seconds = config.parallel.worker_timeout
        self._ahead = 1 if config.scheduler.async_scheduling else 0
        self._callbacks: list[FailureCallback] = []
        self._failure: str | None = None
        self._page: ProgressPage | None = None
        self._call_ids = itertools.count(1)
        self._given_up: set[int] = set()
        # Steps whose outputs are still to come, oldest first; and whether the one started last waits for its bitmask.
        self._pending: list[_Output] = []
        self._awaits_bitmask = False
        self._group = RankGroup(config, worker_class, replica, self._failed)

    # ---- at start

    def get_kv_cache_specs(self) -> list[list[LayerKVSpec]]:
        return self._ask("get_kv_cache_specs", list[LayerKVSpec])

    def determine_available_memory(self) -> list[int]:
        memory = self._ask("determine_available_memory", int)
        # On one host's CPU each rank sees what is free for all of them.
        return [own // len(memory) for own in memory] if self.get_model_limits().device == "cpu" else memory

    def get_model_limits(self) -> ModelLimits:
        limits: list[ModelLimits] = self._ask("get_model_limits", ModelLimits)
        return _agreed(limits, "the model's limits")

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        self._ask("initialize_from_config", None, (kv_cache, max_model_len))

    def measure_token_rate(self) -> float:
        rates: list[float] = self._ask("measure_token_rate", float)
        return min(rates)

    def describe(self) -> dict[str, str]:
        parts: list[dict[str, str]] = self._ask("describe", dict[str, str])
        whole = {}
        for name in sorted({name for own in parts for name in own}):
            values = [own.get(name, "nothing") for own in parts]
            whole[name] = ", ".join(values) if name in OF_EACH_RANK else _agreed(values, name)
        return whole

    # ---- steps

    def execute_model(self, plan: SchedulerOutput) -> Future[None]:
        forward: Future[None] = Future()
        try:
            self._group.send(ToRanks.PLAN, plan)
            self._awaits_bitmask = plan.awaits_bitmask
            forward.set_result(None)
        except Exception as error:
            forward.set_exception(error)
        return forward

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelOutput]:
        output = _Output(self)
        try:
            if self._awaits_bitmask:
                self._group.send(ToRanks.BITMASK, bitmask)
            self._pending.append(output)
        except Exception as error:
            output.set_exception(error)
        return output

    def read_outputs(self, seconds: float | None, wanted: Future[ModelOutput]) -> bool:
        """Reads outputs until `wanted` has its own, at most `seconds`; True if it has one, or an error."""
        assert isinstance(wanted, _Output)
        limit = self._seconds if seconds is None else seconds
        try:
            while not wanted.is_settled():
                if not self._group.wait(lambda: bool(self._group.outputs), limit, self._tick):
                    if limit < self._seconds:
                        return False
                    self._group.time_out(limit)
                while self._group.outputs:
                    self._pending.pop(0).set_result(self._group.outputs.popleft())
        except Exception as error:
            pending, self._pending = self._pending, []
            for output in pending:
                output.set_exception(error)
        return wanted.is_settled()

    def use_idle_time(self) -> bool:
        return any(self._ask("use_idle_time", bool))

    @property
    def max_concurrent_batches(self) -> int:
        return self._group.grid.pipeline_parallel_size + self._ahead

    # ---- calls

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._ask(method, Any, args, timeout)

    def watch_progress(self, page: ProgressPage) -> None:
        self._page = page

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._callbacks.append(callback)
        if self._failure is not None:
            callback(self._failure)

    def shutdown(self) -> None:
        self._group.close()

    def _ask(self, method: str, kind: Any, args: Sequence[Any] = (), timeout: float | None = None) -> list[Any]:
        """Every rank's result of a call, as `kind`, in rank order; raises what one raised."""
        call_id, group = next(self._call_ids), self._group
        encoded = [msgspec.Raw(msgspec.msgpack.encode(arg)) for arg in args]
        group.send(ToRanks.CALL, Call(call_id, method, encoded))
        keys = [(call_id, index) for index in range(group.grid.num_ranks)]
        limit = self._seconds if timeout is None else min(timeout, self._seconds)
        if not group.wait(lambda: all(key in group.replies for key in keys), limit, self._tick):
            if limit == self._seconds:
                group.time_out(limit)
            self._given_up.add(call_id)
            late = [str(index) for call, index in keys if (call, index) not in group.replies]
            raise TimeoutError(f"{method} took longer than {limit:g} s on rank {', '.join(late)}")
        replies = [group.replies.pop(key) for key in keys]
        self._forget_late_replies()
        _raise_fault(replies)
        return [msgspec.msgpack.decode(reply.result, type=kind) for reply in replies]

    def _forget_late_replies(self) -> None:
        """Those of calls that nobody waits for any more."""
        if self._given_up:
            for key in [key for key in self._group.replies if key[0] in self._given_up]:
                del self._group.replies[key]

    def _tick(self) -> None:
        if self._page is not None:
            self._page.tick()

    def _failed(self, reason: str) -> None:
        self._failure = reason
        for callback in self._callbacks:
            callback(reason)


def _agreed(values: Sequence[Value], what: str) -> Value:
    """What all ranks say. Raises ConfigError where they do not say the same."""
    for index, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"mismatched ranks, which do not hold the same model: {what} is {values[0]} on rank 0, "
                f"{value} on rank {index}"
            )
    return values[0]


def _raise_fault(replies: Sequence[Reply]) -> None:
    """Raises the first rank's fault, if there is one; its number says whose, unless all ranks failed alike."""
    faults = [(index, reply.fault) for index, reply in enumerate(replies) if reply.fault is not None]
    if faults:
        index, fault = faults[0]
        alike = len(faults) == len(replies) and all(other == fault for _, other in faults)
        error = error_of(fault, "" if alike else f"rank {index}")
        # A refusal is the request's; a rank that refuses alone says so as well.
        raise error if alike or not isinstance(error, RequestError) else RuntimeError(f"rank {index}: {error}")
