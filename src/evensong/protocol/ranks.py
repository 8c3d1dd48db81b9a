"""What a core and the workers of its ranks say to each other: orders over the lifeline, then messages in rings.

A message is one byte, its kind, and a msgpack body. Plans and calls go to every rank in the same order; each rank
answers in a ring of its own.
"""

from __future__ import annotations

import builtins
from enum import IntEnum

import msgspec

from evensong.protocol.errors import ConfigError, ErrorBody, RequestError


class WorkerOrders(msgspec.Struct):
    """First bytes of a worker. Every `_fd` and doorbell is inherited; `processors` are those it is bound to, if any.

    `links_fd` is the memory that the ranks share among themselves, None for a rank that is alone. `of_main_thread`: the
    parent's main thread started it, so that the kernel can end it with that.
    """

    config: msgspec.Raw
    worker_class: str
    title: str
    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    plans_fd: int
    answers_fd: int
    doorbell: tuple[int, int]
    core_doorbell: tuple[int, int]
    progress_fd: int
    links_fd: int | None = None
    processors: tuple[int, ...] | None = None
    of_main_thread: bool = False


class ToRanks(IntEnum):
    """Kinds of messages from the core."""

    PLAN = 1  # SchedulerOutput
    BITMASK = 2  # GrammarBitmask, or none: for the plan before it, if that awaits one
    CALL = 3  # Call
    END = 4
    PING = 5  # asks for nothing: a rank that hangs does not read it


class FromRank(IntEnum):
    """Kinds of messages from a rank."""

    READY = 1
    OUTPUT = 2  # ModelOutput
    REPLY = 3  # Reply
    FAILED = 4  # Fault; the process ends


class Call(msgspec.Struct, array_like=True):
    """A worker's public method, by name; each argument is read as the type that the method declares."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


class Fault(msgspec.Struct, array_like=True):
    """An error as it crosses: the name of its class, what it says, and a refusal's whole form."""

    kind: str
    message: str
    body: ErrorBody | None = None


class Reply(msgspec.Struct, array_like=True):
    """A call's result (msgpack), or why there is none."""

    call_id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    fault: Fault | None = None


def fault_of(error: BaseException) -> Fault:
    """What crosses of an error."""
    kind = ConfigError.__name__ if isinstance(error, ConfigError) else type(error).__name__
    body = error.body() if isinstance(error, RequestError) else None
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    # A path in the message may hold bytes that are no text.
    return Fault(kind, message.encode("utf-8", "replace").decode(), body)


def error_of(fault: Fault, place: str = "") -> Exception:
    """The error on this side: of the same class if that is Python's own or a ConfigError, else a RuntimeError.

    `place`, such as `rank 1`, comes before what it says; a refusal is the user's and stays as it is.
    """
    if fault.body is not None:
        return RequestError.from_body(fault.body)
    message = f"{place}: {fault.message}" if place else fault.message
    if fault.kind == ConfigError.__name__:
        return ConfigError(message)
    own = getattr(builtins, fault.kind, None)
    # Those that need more than a message (UnicodeDecodeError) are not made.
    if isinstance(own, type) and issubclass(own, Exception) and not issubclass(own, UnicodeError):
        return own(message)
    return RuntimeError(f"{place}: {fault.kind}: {fault.message}" if place else f"{fault.kind}: {fault.message}")
