"""What both multiprocess clients share: frames to a core, messages from it, pending calls, the end."""

from __future__ import annotations

import importlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, cast

import msgspec
import zmq

from evensong.config.sections import EngineConfig
from evensong.protocol.control import VERBS
from evensong.protocol.errors import EngineDeadError, EvensongError, RequestError, UtilityError
from evensong.protocol.handshake import ClientAddress, Membership
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import EngineCoreOutputs, EngineDeath, UtilityReply
from evensong.protocol.request import AbortRequests, EngineCoreRequest, UtilityCall
from evensong.protocol.wire import (
    ENGINE_CORE_DEAD,
    BadMessage,
    Codec,
    MessageType,
    Stamp,
    engine_identity,
    pack,
    unpack,
)

CLIENT_INCARNATION = 1
IO_THREADS = 2
DEFAULT_UTILITY_SECONDS = 300.0
ENGINE_INDEX = 0
# The launcher lies above the clients, so it is found by name (one of the doors of ARCHITECTURE.md).
LAUNCHER = "evensong.engine.launch:open_launch"
OnChange = Callable[[Membership, EvensongError | None], None]


class CoreLaunch(Protocol):
    """What a client asks of the launcher (engine/launch.py) that runs its core."""

    token: bytes
    client: ClientAddress

    def start_core(self) -> None:
        """Starts the core."""

    def wait_ready(self) -> Resources:
        """Blocks until it takes requests; raises EngineStartError or ConfigError."""

    def close(self, seconds: float = 0.0) -> None:
        """Ends it."""


def open_launch(place: str, config: EngineConfig, on_change: OnChange) -> CoreLaunch:
    """The launch that the function at `place` ("module:name") makes."""
    module, _, name = place.partition(":")
    return cast(CoreLaunch, getattr(importlib.import_module(module), name)(config, on_change))


class CoreChannel:
    """Frames to one core and messages from it. Writing and reading may be done by different threads."""

    def __init__(self, stamp: Stamp) -> None:
        self.num_dropped = 0
        self.incarnation: int | None = None
        self._stamp = stamp
        self._identity = engine_identity(ENGINE_INDEX)
        self._requests = Codec(EngineCoreRequest)
        self._outputs = Codec(EngineCoreOutputs)

    def add(self, request: EngineCoreRequest) -> list[bytes]:
        """An ADD; the core answers to this client, whatever the request says."""
        request.client_index = self._stamp.sender
        return self._frames(MessageType.ADD, self._requests.encode(request))

    def abort(self, request_ids: list[str]) -> list[bytes]:
        """An ABORT."""
        return self._frames(MessageType.ABORT, msgspec.msgpack.encode(AbortRequests(request_ids)))

    def utility(self, call_id: int, verb: str, args: msgspec.Raw) -> list[bytes]:
        """A UTILITY call."""
        call = UtilityCall(call_id, self._stamp.sender, verb, args)
        return self._frames(MessageType.UTILITY, msgspec.msgpack.encode(call))

    def check(self, frames: list[bytes]) -> None:
        """Counts a message on the request socket that is not a greeting of ours.

        A core's first message there only makes it known to the socket; it is read so that nothing piles up.
        """
        try:
            if len(frames) < 2:
                raise BadMessage("no header")
            self._stamp.read(frames[1])
        except BadMessage:
            self.num_dropped += 1

    def read(self, frames: list[bytes]) -> EngineCoreOutputs | EngineDeath | None:
        """The message in `frames`; None, and counted, when it is not from the core that this client talks to."""
        try:
            return self._read(frames)
        except BadMessage:
            self.num_dropped += 1
            return None

    def _read(self, frames: list[bytes]) -> EngineCoreOutputs | EngineDeath:
        if len(frames) not in (2, 3):
            raise BadMessage(f"{len(frames)} frames, expected 2 or 3")
        header = self._stamp.read(frames[0])
        if header.sender != ENGINE_INDEX:
            raise BadMessage(f"message of engine {header.sender}")
        if self.incarnation is not None and header.incarnation != self.incarnation:
            raise BadMessage(f"message of incarnation {header.incarnation}, the core is in {self.incarnation}")
        if header.type == MessageType.OUTPUTS and len(frames) == 2:
            return self._outputs.decode(frames[1])
        if header.type == MessageType.DEAD and len(frames) == 3 and frames[1] == ENGINE_CORE_DEAD:
            return Codec(EngineDeath).decode(frames[2])
        raise BadMessage(f"unexpected {header.type.name} of {len(frames)} frames")

    def _frames(self, type: MessageType, payload: bytes) -> list[bytes]:
        return [self._identity, self._stamp.header(type), payload]


class UtilityCalls:
    """Calls of control verbs that wait for their reply; any thread may use it."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._dead: EngineDeadError | None = None

    def open(self) -> tuple[int, Future[Any]]:
        """A new call id and its future, which fails at once when the core is dead."""
        future: Future[Any] = Future()
        # A running future cannot be cancelled under the thread that resolves it.
        future.set_running_or_notify_cancel()
        with self._lock:
            call_id = next(self._ids)
            if self._dead is None:
                self._waiting[call_id] = future
            else:
                future.set_exception(self._dead)
        return call_id, future

    def forget(self, call_id: int) -> None:
        """The caller no longer waits; a late reply is ignored."""
        with self._lock:
            self._waiting.pop(call_id, None)

    def resolve(self, reply: UtilityReply) -> None:
        """Gives a reply to the one who waits for it, if anyone does."""
        with self._lock:
            future = self._waiting.pop(reply.call_id, None)
        if future is None:
            return
        if reply.refusal is not None:
            future.set_exception(RequestError.from_body(reply.refusal))
            return
        if reply.failure is not None:
            future.set_exception(UtilityError(reply.failure))
            return
        try:
            result = unpack(reply.result)
        except (msgspec.DecodeError, RecursionError) as error:
            future.set_exception(UtilityError(f"the reply cannot be read: {error}"))
        else:
            future.set_result(result)

    def fail(self, error: EngineDeadError) -> None:
        """Fails every call, those to come too."""
        with self._lock:
            self._dead = error
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(error)


class ClientInbox(ABC):
    """What arrives for a client: outputs in order, replies, and at last the reason why there will be no more."""

    def __init__(self) -> None:
        self.calls = UtilityCalls()
        self.dead: EngineDeadError | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def _put(self, item: EngineCoreOutputs | EngineDeadError) -> None:
        """Queues `item` behind what came before; an error may come from any thread, and under the lock."""

    def deliver(self, message: EngineCoreOutputs | EngineDeath) -> None:
        """Takes a message of the core, where messages are read."""
        if isinstance(message, EngineDeath):
            self.fail(EngineDeadError(message.reason))
            return
        if message.utility is not None:
            self.calls.resolve(message.utility)
        if message.outputs or message.admissions or message.stats is not None:
            self._put(message)

    def update(self, membership: Membership, fault: EvensongError | None = None) -> None:
        """What the launcher knows, on the launcher's thread."""
        if (error := fault_of(membership, fault)) is not None:
            self.fail(error)

    def fail(self, error: EngineDeadError) -> None:
        """Every waiter, now or later, gets `error`; the first reason stays. From any thread."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = error
            self._put(error)
        self.calls.fail(error)


def utility_args(verb: str, timeout: float | None, args: dict[str, Any]) -> msgspec.Raw:
    """The arguments of a control verb as they travel; raises UtilityError for an unknown verb or argument."""
    if verb not in VERBS:
        raise UtilityError(f"there is no control verb {verb!r}")
    known = VERBS[verb].args
    if "timeout" in known:
        args = {**args, "timeout": timeout}
    if unknown := set(args) - set(known):
        raise UtilityError(f"{verb} takes {', '.join(known) or 'no arguments'}, not {', '.join(sorted(unknown))}")
    try:
        return pack(args)
    except (TypeError, ValueError, RecursionError) as error:
        raise UtilityError(f"the arguments of {verb} cannot be sent: {error}") from error


def bind(sock: zmq.Socket[Any], address: str) -> None:
    """Binds a client's socket. An unroutable request is an error, never lost; nothing lingers.

    Outputs keep their bounded queue: a client that does not read them must be felt by the core.
    """
    sock.setsockopt(zmq.LINGER, 0)
    if sock.type == zmq.ROUTER:
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sock.bind(address)


def again(error: EngineDeadError) -> EngineDeadError:
    """The same error for one more waiter, with a traceback of its own."""
    return EngineDeadError(*error.args)


def fault_of(membership: Membership, fault: EvensongError | None) -> EngineDeadError | None:
    """Why the core of this client is dead, None while it lives."""
    for member in membership.members:
        if member.index == ENGINE_INDEX and member.state == "DEAD":
            return EngineDeadError(member.reason or "the engine core died")
    return None if fault is None else EngineDeadError(str(fault))
