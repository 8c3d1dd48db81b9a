"""EngineCoreClient: what a front end sees of a core, wherever that core runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from evensong.protocol.errors import EngineDeadError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import EngineCoreOutputs
from evensong.protocol.request import EngineCoreRequest


class SyncCoreClient(ABC):
    """Blocking calls, for LLMEngine. Every method raises EngineDeadError once the core is dead."""

    @property
    @abstractmethod
    def resources(self) -> Resources:
        """What the core learned at start-up."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Submits a request; its Admission arrives with the outputs."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests by id; unknown ids are ignored."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The next message of the core; blocks while requests run (in process: runs one step)."""

    @abstractmethod
    def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        """Result of a control verb; raises RequestError, UtilityError, TimeoutError or EngineDeadError."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the core and frees everything; safe to call twice."""


class AsyncCoreClient(ABC):
    """The same for AsyncLLM, on one event loop. Every method raises EngineDeadError once the core is dead."""

    @property
    @abstractmethod
    def resources(self) -> Resources:
        """What the core learned at start-up; raises EngineStartError before it is ready."""

    @property
    @abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is dead, None while it lives."""

    @abstractmethod
    async def add_request(self, request: EngineCoreRequest) -> None:
        """Submits a request; its Admission arrives with the outputs."""

    @abstractmethod
    async def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests by id; unknown ids are ignored."""

    @abstractmethod
    async def get_output(self) -> EngineCoreOutputs:
        """The next message of the core."""

    @abstractmethod
    async def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        """Result of a control verb; raises RequestError, UtilityError, TimeoutError or EngineDeadError."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the core and frees everything; safe to call twice."""
