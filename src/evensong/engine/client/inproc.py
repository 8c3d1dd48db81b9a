"""Clients whose core runs in the caller's process: for LLMEngine, and for AsyncLLM with the step in a thread (C2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evensong.config.sections import EngineConfig, for_terminal
from evensong.engine.client.base import AsyncCoreClient, SyncCoreClient
from evensong.engine.core.control import Control
from evensong.engine.core.core import EngineCore, Outputs
from evensong.engine.core.pausing import Later
from evensong.executor.base import Executor
from evensong.executor.factory import make_executor as make_configured
from evensong.protocol.control import VERBS
from evensong.protocol.errors import EngineDeadError, EvensongError, UtilityError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, FinishReason
from evensong.protocol.request import EngineCoreRequest

MakeExecutor = Callable[[EngineConfig], Executor]


class InprocClient(SyncCoreClient):
    """Calls the core directly; `get_output` is one step."""

    def __init__(self, config: EngineConfig, make_executor: MakeExecutor = make_configured) -> None:
        config = for_terminal(config)
        self._core = EngineCore(config, lambda: make_executor(config))
        self._admissions: list[Admission] = []
        self._pending: list[EngineCoreOutput] = []
        self._control = Control(self._core, self._keep)
        self._dead: EngineDeadError | None = None

    @property
    def resources(self) -> Resources:
        return self._core.resources

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        admission = self._core.add_request(request)
        if admission is not None:
            self._admissions.append(admission)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._check_alive()
        self._keep(self._core.finish_requests(request_ids, FinishReason.ABORT))

    def get_output(self) -> EngineCoreOutputs:
        self._check_alive()
        if not self._core.has_work():
            self._core.compiling.wait()
        self._admissions += [admission for _, admission in self._core.take_admissions()]
        model_ran = self._step()
        if model_ran and not self._core.scheduler.has_requests():
            self._core.scheduler.check_kv_cache()
        admissions, self._admissions = self._admissions, []
        pending, self._pending = self._pending, []
        stats = self._core.scheduler.make_stats()
        return EngineCoreOutputs(outputs=pending, admissions=admissions, stats=stats, timestamp=time.time())

    def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        self._check_alive()
        declared = VERBS.get(verb)
        if declared is not None and "timeout" in declared.args:
            args = {"timeout": timeout, **args}
        try:
            result = self._control.call(verb, args)
            while isinstance(result, Later):
                # What it waits for happens in steps, which are taken here; their outputs are kept.
                if result.is_due():
                    return result.finish()
                self._step()
            return result
        except (EvensongError, TimeoutError):
            raise
        except (Exception, SystemExit) as error:
            raise UtilityError(f"{verb} failed: {type(error).__name__}: {error}") from error

    def shutdown(self) -> None:
        self._core.shutdown()
        self._dead = self._dead or EngineDeadError("the engine was shut down")

    @property
    def has_work(self) -> bool:
        """True when a step would compute something."""
        return self._core.has_work() or len(self._core.compiling) > 0

    def _step(self) -> bool:
        """One step; True if the model ran."""
        try:
            outputs, model_ran = self._core.step()
            self._core.post_step(model_ran)
        except Exception as error:
            self._dead = EngineDeadError(f"the engine died in a step: {type(error).__name__}: {error}")
            raise self._dead from error
        self._keep(outputs)
        return model_ran

    def _keep(self, outputs: Outputs) -> None:
        for new in outputs.values():
            self._pending.extend(new)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead


class AsyncInprocClient(AsyncCoreClient):
    """The same on an event loop: every call runs in one thread, in order, so that a step does not block the loop."""

    def __init__(self, config: EngineConfig, make_executor: MakeExecutor = make_configured) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="core")
        try:
            self._client = self._thread.submit(InprocClient, config, make_executor).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._work = asyncio.Event()
        self._dead: EngineDeadError | None = None

    @property
    def resources(self) -> Resources:
        return self._client.resources

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._dead

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._call(self._client.add_request, request)
        self._work.set()

    async def abort_requests(self, request_ids: list[str]) -> None:
        await self._call(self._client.abort_requests, request_ids)
        self._work.set()

    async def get_output(self) -> EngineCoreOutputs:
        while True:
            await self._work.wait()
            outputs: EngineCoreOutputs = await self._call(self._client.get_output)
            if not await self._call(lambda: self._client.has_work):
                self._work.clear()
            if outputs.outputs or outputs.admissions or not self._work.is_set():
                return outputs

    async def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        call = self._call(lambda: self._client.call_utility(verb, **args))
        try:
            return await asyncio.wait_for(call, timeout)
        finally:
            self._work.set()

    def shutdown(self) -> None:
        self._thread.submit(self._client.shutdown).result()
        self._thread.shutdown()
        self._dead = self._dead or EngineDeadError("the engine was shut down")
        self._work.set()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except EngineDeadError as error:
            self._dead = error
            raise
