"""Control verbs where they act. Only verbs of protocol/control.py can be called, with the arguments declared there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from evensong.engine.core.core import EngineCore, Outputs
from evensong.engine.core.pausing import Later, Pausing
from evensong.engine.core.profiling import Profiling
from evensong.protocol.control import VERBS, Verb
from evensong.protocol.errors import RequestError, UtilityError
from evensong.protocol.output import FinishReason, UtilityReply
from evensong.protocol.request import UtilityCall
from evensong.protocol.wire import pack, unpack

# Verbs that look, or act on requests alone: they need not wait for steps in flight.
_BESIDE_STEPS = {
    "abort_requests",
    "get_supported_tasks",
    "is_paused",
    "is_scheduler_empty",
    "is_sleeping",
}


class Control:
    """Runs verbs on a core, between steps. `emit` gets the outputs of requests that a verb ends.

    What touches workers or blocks waits for the steps in flight, whose outputs go out first.
    """

    def __init__(self, core: EngineCore, emit: Callable[[Outputs], None]) -> None:
        self._core = core
        self._emit = emit
        self._pausing = Pausing(core, emit)
        self._profiling = Profiling(core.executor, core.scheduler)
        self._late: list[tuple[UtilityCall, Later]] = []

    def answer(self, call: UtilityCall) -> UtilityReply | None:
        """The reply to a call: its result, or why there is none; None when it comes from `late_replies`."""
        return self._reply(call, lambda: self.call(call.verb, unpack(call.args)))

    def late_replies(self) -> list[tuple[int, UtilityReply]]:
        """Replies, each with its client's index, of the verbs that have waited for what is so now."""
        due = [entry for entry in self._late if entry[1].is_due()]
        self._late = [entry for entry in self._late if entry not in due]
        replies = [(call.client_index, self._reply(call, later.finish)) for call, later in due]
        return [(client_index, reply) for client_index, reply in replies if reply is not None]

    def call(self, verb: str, args: Any) -> Any:
        """The result of a verb, or a Later; raises UtilityError for a call that is not in the table.

        Raises RequestError where it does not fit the state of the engine.
        """
        declared = VERBS.get(verb)
        if declared is None:
            raise UtilityError(f"there is no control verb {verb!r:.60}")
        if not isinstance(args, dict) or not set(args) <= set(declared.args):
            raise UtilityError(f"{verb} takes {', '.join(declared.args) or 'no arguments'}")
        owner = self._pausing if hasattr(self._pausing, verb) else self
        converted = _converted(declared, args)
        if verb not in _BESIDE_STEPS:
            self._emit(self._core.drain())
        return getattr(owner, verb)(**converted)

    def _reply(self, call: UtilityCall, act: Callable[[], Any]) -> UtilityReply | None:
        """Never raises."""
        try:
            result = act()
            if isinstance(result, Later):
                self._late.append((call, result))
                return None
            return UtilityReply(call.call_id, result=pack(result))
        except RequestError as error:
            return UtilityReply(call.call_id, refusal=error.body())
        except (Exception, SystemExit) as error:  # whatever a verb, or a worker's method, does: the core lives on
            return UtilityReply(call.call_id, failure=f"{call.verb} failed: {type(error).__name__}: {error}")

    # ---- requests

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests; their clients get a last output with finish_reason abort."""
        self._emit(self._core.finish_requests(request_ids, FinishReason.ABORT))

    def is_scheduler_empty(self) -> bool:
        """True when nothing waits or runs."""
        return not self._core.scheduler.has_requests()

    # ---- caches

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets cached blocks; False while requests hold some, unless they are to be computed again."""
        if reset_running_requests:
            self._core.scheduler.preempt_all()
        return self._core.scheduler.reset_prefix_cache()

    def check_kv_cache(self) -> dict[str, int]:
        """Proves the KV cache's invariants; the block counts."""
        return self._core.scheduler.check_kv_cache()

    # ---- workers

    def collective_rpc(self, method: str, timeout: float | None = None, args: list[Any] | None = None) -> list[Any]:
        """Results of a worker method on every rank."""
        self._pausing.check_awake("collective_rpc")
        if args:
            raise RequestError(f"{method} takes no arguments, as every method that may be called", param="args")
        return self._core.executor.collective_rpc(method, timeout)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Starts the profiler of every rank."""
        self._pausing.check_awake("start_profile")
        self._profiling.start(profile_prefix)

    def stop_profile(self) -> list[str]:
        """Stops it; the one trace of all ranks."""
        return self._profiling.stop()

    def get_supported_tasks(self) -> list[str]:
        """What the model can do."""
        return list(self._core.resources.supported_tasks)


def _converted(verb: Verb, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments checked against the table; raises RequestError naming the first that is not of its type."""
    types = {arg.name: arg.type for arg in verb.params}
    for arg in verb.params:
        if arg.required and arg.name not in args:
            raise RequestError(f"{verb.name} needs {arg.name}", param=arg.name)
    converted = {}
    for name, value in args.items():
        try:
            converted[name] = msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise RequestError(f"{verb.name}: {name}: {error}", param=name) from error
    return converted
