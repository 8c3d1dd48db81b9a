"""What reaches the core's loop, decoded: one small record a kind of message."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue

from evensong.protocol.request import EngineCoreRequest, UtilityCall


@dataclass(frozen=True)
class Add:
    """A request of a client."""

    client_index: int
    request: EngineCoreRequest


@dataclass(frozen=True)
class Abort:
    """Requests to end. They stand in the eager queue too, which a running step looks at."""

    request_ids: list[str]


@dataclass(frozen=True)
class Utility:
    """A control verb to run."""

    client_index: int
    call: UtilityCall


@dataclass(frozen=True)
class Undecodable:
    """A message whose sender is known and whose content is not: the sender gets the reason.

    `request_id` names the ADD that failed, `call_id` the utility call; both None: nothing to answer to.
    """

    client_index: int
    reason: str
    request_id: str | None = None
    attempt: int = 0
    call_id: int | None = None


@dataclass(frozen=True)
class Compiled:
    """The grammar of a request that waits for one is there, or was refused."""


@dataclass(frozen=True)
class ClientLost:
    """A client stopped reading: everything of its own ends."""

    client_index: int


@dataclass(frozen=True)
class Shutdown:
    """Take nothing new; what runs may take `seconds` more, then it is aborted."""

    seconds: float


@dataclass(frozen=True)
class Failure:
    """Something that the core cannot live without is gone."""

    reason: str


Message = Add | Abort | Utility | Undecodable | Compiled | ClientLost | Shutdown | Failure
Inbox = SimpleQueue[Message]
