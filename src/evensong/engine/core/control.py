"""Control verbs where they act. Only verbs of protocol/control.py can be called, with the arguments declared there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from evensong.engine.core.core import EngineCore, Outputs
from evensong.protocol.control import VERBS
from evensong.protocol.errors import UtilityError
from evensong.protocol.output import FinishReason, UtilityReply
from evensong.protocol.request import UtilityCall
from evensong.protocol.wire import pack, unpack


class Control:
    """Runs verbs on a core, between steps. `emit` gets the outputs of requests that a verb ends."""

    def __init__(self, core: EngineCore, emit: Callable[[Outputs], None]) -> None:
        self._core = core
        self._emit = emit

    def answer(self, call: UtilityCall) -> UtilityReply:
        """The reply to a call: its result, or why there is none. Never raises."""
        try:
            args = unpack(call.args)
            return UtilityReply(call.call_id, result=pack(self.call(call.verb, args)))
        except (Exception, SystemExit) as error:  # whatever a verb, or a worker's method, does: the core lives on
            return UtilityReply(call.call_id, failure=f"{call.verb} failed: {type(error).__name__}: {error}")

    def call(self, verb: str, args: Any) -> Any:
        """The result of a verb; raises UtilityError for a call that is not in the table."""
        declared = VERBS.get(verb)
        if declared is None:
            raise UtilityError(f"there is no control verb {verb!r:.60}")
        if not isinstance(args, dict) or not set(args) <= set(declared.args):
            raise UtilityError(f"{verb} takes {', '.join(declared.args) or 'no arguments'}")
        return getattr(self, verb)(**args)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests; their clients get a last output with finish_reason abort."""
        ids = msgspec.convert(request_ids, list[str])
        self._emit(self._core.finish_requests(ids, FinishReason.ABORT))

    def reset_prefix_cache(self) -> bool:
        """Forgets cached blocks; False while requests hold some."""
        return self._core.scheduler.reset_prefix_cache()

    def check_kv_cache(self) -> dict[str, int]:
        """Proves the KV cache's invariants; the block counts."""
        return self._core.scheduler.check_kv_cache()

    def collective_rpc(self, method: str, timeout: float | None = None, args: list[Any] | None = None) -> list[Any]:
        """Results of a worker method on every rank."""
        return self._core.executor.collective_rpc(method, timeout, tuple(args or ()))

    def get_supported_tasks(self) -> list[str]:
        """What the model can do."""
        return list(self._core.resources.supported_tasks)

    def is_scheduler_empty(self) -> bool:
        """True when nothing waits or runs."""
        return not self._core.scheduler.has_requests()
