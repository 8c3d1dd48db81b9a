"""The core's two IO threads: ZMQ to the inbox, and outputs to ZMQ. Decoding and encoding happen here, off the loop."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, TypeGuard

import msgspec
import zmq

from evensong.engine.core.inbox import Abort, Add, ClientLost, Failure, Inbox, Message, Undecodable, Utility
from evensong.protocol.errors import ErrorBody
from evensong.protocol.handshake import ClientAddress
from evensong.protocol.output import (
    Admission,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeath,
    FinishReason,
    UtilityReply,
)
from evensong.protocol.request import AbortRequests, EngineCoreRequest, UtilityCall
from evensong.protocol.wire import ENGINE_CORE_DEAD, BadMessage, Codec, MessageType, Stamp, engine_identity
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

# A client that leaves more messages than this unread (in ZMQ's buffers and here) loses its requests.
SEND_HIGH_WATER = 4096
MAX_BACKLOG = 65536
RETRY_SECONDS = 0.01
DEATH_LINGER_MS = 1000
MAX_REASON = 2000
ATTEMPT_FIELD = EngineCoreRequest.__struct_fields__.index("attempt")


class InputThread:
    """One DEALER per front end; decoded messages go to the inbox, aborts to the eager queue as well."""

    def __init__(
        self,
        context: zmq.Context[Any],
        clients: list[ClientAddress],
        stamp: Stamp,
        inbox: Inbox,
        aborts: SimpleQueue[list[str]],
    ) -> None:
        self.num_dropped = 0
        self._stamp = stamp
        self._inbox = inbox
        self._aborts = aborts
        self._codecs: dict[MessageType, Codec[Any]] = {
            MessageType.ADD: Codec(EngineCoreRequest),
            MessageType.ABORT: Codec(AbortRequests),
            MessageType.UTILITY: Codec(UtilityCall),
        }
        self._wake_read, self._wake_write = os.pipe()
        sockets = {self._connect(context, client): client.client_index for client in clients}
        self._thread = threading.Thread(target=self._run, args=(sockets,), name="core-input", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes its sockets."""
        os.write(self._wake_write, b"\x00")
        self._thread.join(timeout=2)

    def _connect(self, context: zmq.Context[Any], client: ClientAddress) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = 0
        socket.setsockopt(zmq.IDENTITY, engine_identity(self._stamp.sender))
        socket.connect(client.requests)
        # A ROUTER can address a peer only after it has heard from it.
        socket.send_multipart([self._stamp.header(MessageType.HELLO), b""])
        return socket

    def _run(self, sockets: dict[zmq.Socket[bytes], int]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    return
                for socket, client_index in sockets.items():
                    if socket in ready:
                        self._receive(socket.recv_multipart(), client_index)
        except Exception as error:
            logger.exception("the input thread failed")
            self._inbox.put(Failure(f"the input thread failed: {error}"))
        finally:
            for socket in sockets:
                socket.close()

    def _receive(self, frames: list[bytes], client_index: int) -> None:
        try:
            if len(frames) != 2:
                raise BadMessage(f"{len(frames)} frames, expected 2")
            type = self._stamp.read(frames[0]).type
        except BadMessage as error:
            self.num_dropped += 1
            logger.warning("a foreign message was dropped (%d so far): %s", self.num_dropped, error)
            return
        try:
            message = self._decode(type, frames[1], client_index)
        except Exception as error:  # of whatever kind: the sender gets it, the thread lives on
            message = _undecodable(type, frames[1], client_index, str(error))
        if isinstance(message, Abort):
            self._aborts.put(message.request_ids)
        if message is not None:
            self._inbox.put(message)

    def _decode(self, type: MessageType, payload: bytes, client_index: int) -> Message | None:
        codec = self._codecs.get(type)
        if codec is None:
            if type is not MessageType.START_DP_WAVE:  # waves concern replicas that share experts: none here
                raise BadMessage(f"a core takes no {type.name}")
            return None
        record = codec.decode(payload)
        if isinstance(record, EngineCoreRequest):
            record.client_index = client_index
            return Add(client_index, record)
        if isinstance(record, AbortRequests):
            return Abort(record.request_ids)
        return Utility(client_index, record)


def _undecodable(type: MessageType, payload: bytes, client_index: int, reason: str) -> Undecodable:
    """What can be saved of a message so that its sender gets an answer: the id at its head."""
    head = _head_of_array(payload)
    attempt: object = 0
    with contextlib.suppress(Exception):
        attempt = msgspec.msgpack.decode(payload)[ATTEMPT_FIELD]
    if type is MessageType.ADD and isinstance(head, str):
        return Undecodable(client_index, reason, request_id=head, attempt=attempt if isinstance(attempt, int) else 0)
    if type is MessageType.UTILITY and isinstance(head, int):
        return Undecodable(client_index, reason, call_id=head)
    return Undecodable(client_index, reason)


def _head_of_array(payload: bytes) -> object:
    """The first element of a msgpack array whatever follows it (cut off, nested too deeply); None where there is none.

    Only str and int are read, as records begin with an id. Format bytes: the MessagePack specification.
    """
    with contextlib.suppress(IndexError, ValueError, msgspec.DecodeError):
        start = {0xDC: 3, 0xDD: 5}.get(payload[0], 1 if payload[0] & 0xF0 == 0x90 else len(payload))
        first = payload[start]
        if first & 0xE0 == 0xA0:
            end = start + 1 + (first & 0x1F)
        elif first in (0xD9, 0xDA, 0xDB):
            width = 1 << (first - 0xD9)
            end = start + 1 + width + int.from_bytes(payload[start + 1 : start + 1 + width], "big")
        elif 0xCC <= first <= 0xD3:
            end = start + 1 + (1 << (first & 3))
        elif first < 0x80 or first >= 0xE0:
            end = start + 1
        else:
            return None
        return msgspec.msgpack.decode(payload[start:end], type=str | int)
    return None


_Item = tuple[int, EngineCoreOutputs] | EngineDeath | None


def _only_admits(item: _Item) -> TypeGuard[tuple[int, EngineCoreOutputs]]:
    """Whether it is a message of admissions and nothing else."""
    if not isinstance(item, tuple):
        return False
    message = item[1]
    return bool(message.admissions) and not message.outputs and message.utility is None and message.stats is None


class OutputThread:
    """One PUSH per front end. `send` never blocks; a client that does not read loses its requests, no one waits."""

    def __init__(self, context: zmq.Context[Any], clients: list[ClientAddress], stamp: Stamp, inbox: Inbox) -> None:
        self._stamp = stamp
        self._inbox = inbox
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._backlogs: dict[int, collections.deque[list[bytes]]] = {
            c.client_index: collections.deque() for c in clients
        }
        # Clients that were reported as lost and have not caught up since.
        self._lost: set[int] = set()
        self._encoder = msgspec.msgpack.Encoder()
        sockets = {client.client_index: self._connect(context, client) for client in clients}
        self._thread = threading.Thread(target=self._run, args=(sockets,), name="core-output", daemon=True)
        self._thread.start()

    def send(self, client_index: int, message: EngineCoreOutputs) -> None:
        """Hands a message on; any thread may call it."""
        message.engine_index, message.incarnation = self._stamp.sender, self._stamp.incarnation
        self._queue.put((client_index, message))

    def send_death(self, reason: str) -> None:
        """Tells every client that this core dies, after all that was sent before."""
        # A lone surrogate (a file's name may hold one) must not cost the clients the notice.
        text = reason.encode("utf-8", "replace").decode()[:MAX_REASON]
        self._queue.put(EngineDeath(self._stamp.sender, self._stamp.incarnation, text))

    def close(self) -> None:
        """Sends what is queued, waits for it a bounded time, and closes the sockets."""
        self._queue.put(None)
        self._thread.join(timeout=2 * DEATH_LINGER_MS / 1000)

    def _connect(self, context: zmq.Context[Any], client: ClientAddress) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        socket.linger = DEATH_LINGER_MS
        socket.sndhwm = SEND_HIGH_WATER
        socket.connect(client.outputs)
        return socket

    def _run(self, sockets: dict[int, zmq.Socket[bytes]]) -> None:
        try:
            while True:
                waiting = any(self._backlogs.values())
                try:
                    item = self._queue.get(timeout=RETRY_SECONDS if waiting else None)
                except Empty:
                    self._flush(sockets)
                    continue
                for one in self._with_what_waits(item):
                    if one is None:
                        self._flush_last(sockets)
                        return
                    for client_index, frames in self._frames(one):
                        if client_index in self._backlogs:
                            self._backlogs[client_index].append(frames)
                self._flush(sockets)
        except Exception as error:
            logger.exception("the output thread failed")
            self._inbox.put(Failure(f"the output thread failed: {error}"))
        finally:
            for socket in sockets.values():
                socket.close()

    def _with_what_waits(self, item: _Item) -> list[_Item]:
        """An item and those behind it. Admissions in a row become one message: each message wakes up its client."""
        items = [item]
        while item is not None:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            last = items[-1]
            if _only_admits(last) and _only_admits(item) and last[0] == item[0]:
                last[1].admissions.extend(item[1].admissions)
            else:
                items.append(item)
        return items

    def _frames(self, item: tuple[int, EngineCoreOutputs] | EngineDeath) -> list[tuple[int, list[bytes]]]:
        if isinstance(item, EngineDeath):
            frames = [self._stamp.header(MessageType.DEAD), ENGINE_CORE_DEAD, self._encoder.encode(item)]
            return [(client_index, frames) for client_index in self._backlogs]
        client_index, message = item
        header = self._stamp.header(MessageType.OUTPUTS)
        try:
            payload = self._encoder.encode(message)
        except Exception as error:  # that message's requests and caller get it; the thread lives on
            logger.exception("a message to client %d cannot be encoded", client_index)
            payload = self._encoder.encode(self._apology(message, str(error)))
        return [(client_index, [header, payload])]

    def _flush(self, sockets: dict[int, zmq.Socket[bytes]]) -> None:
        for client_index, backlog in self._backlogs.items():
            while backlog:
                try:
                    sockets[client_index].send_multipart(backlog[0], flags=zmq.NOBLOCK)
                except zmq.Again:
                    break
                backlog.popleft()
            if not backlog:
                self._lost.discard(client_index)
            elif len(backlog) > MAX_BACKLOG and client_index not in self._lost:
                # What it is owed stays, so that it learns of its requests' ends if it reads again.
                self._lost.add(client_index)
                self._inbox.put(ClientLost(client_index))
            elif len(backlog) > 2 * MAX_BACKLOG:
                backlog.clear()
                self._inbox.put(ClientLost(client_index))

    def _flush_last(self, sockets: dict[int, zmq.Socket[bytes]]) -> None:
        """What is still owed, to the clients that read it within a bounded time."""
        until = time.monotonic() + DEATH_LINGER_MS / 1000
        self._flush(sockets)
        while any(self._backlogs.values()) and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)
            self._flush(sockets)

    def _apology(self, message: EngineCoreOutputs, reason: str) -> EngineCoreOutputs:
        """The message with each part that cannot be encoded replaced by an error; requests so answered end."""
        error = ErrorBody(f"the result cannot be encoded: {reason}", 500, "internal_error")
        outputs = list(message.outputs)
        for index, output in enumerate(outputs):
            if not self._encodable(output):
                last = EngineCoreOutput(output.request_id, output.attempt, output.start, [])
                last.finish_reason, last.error = FinishReason.ERROR, error
                outputs[index] = last
                self._inbox.put(Abort([output.request_id]))
        admissions = [
            a if self._encodable(a) else Admission(a.request_id, a.attempt, refusal=error) for a in message.admissions
        ]
        utility = message.utility
        if utility is not None and not self._encodable(utility):
            utility = UtilityReply(utility.call_id, failure=error.message)
        return EngineCoreOutputs(
            message.engine_index, message.incarnation, outputs, admissions, utility, timestamp=message.timestamp
        )

    def _encodable(self, part: object) -> bool:
        try:
            self._encoder.encode(part)
        except Exception:
            return False
        return True
