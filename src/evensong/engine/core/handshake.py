"""ChildHandshake: a child's side of the start-up conversation with the launcher (spec B1); cores and HTTP use it.

One thread owns the socket. Other threads hand it messages; it calls back with each message that comes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from evensong.protocol.handshake import Bootstrap, Hello
from evensong.protocol.wire import BadMessage, MessageType, Stamp
from evensong.utils.lifeline import read_orders, watch
from evensong.utils.logging import get_logger
from evensong.utils.threads import run_in_time

logger = get_logger(__name__)

LINGER_MS = 1000
Receive = Callable[[MessageType, bytes], None]


def begin_child(fd: int) -> Bootstrap:
    """Reads this child's orders from its lifeline; from then on the process ends when its parent does."""
    bootstrap = msgspec.msgpack.decode(read_orders(fd), type=Bootstrap)
    watch(fd)
    return bootstrap


class ChildHandshake:
    """Says HELLO at once; `receive(type, payload)` is called, in the handshake's thread, for each message."""

    def __init__(self, bootstrap: Bootstrap, receive: Receive, context: zmq.Context[Any]) -> None:
        self._stamp = Stamp(bootstrap.token, bootstrap.index, bootstrap.incarnation)
        self._receive = receive
        self._outgoing: collections.deque[tuple[MessageType, bytes] | None] = collections.deque()
        self._wake_read, self._wake_write = os.pipe()
        socket = context.socket(zmq.DEALER)
        socket.linger = LINGER_MS
        socket.connect(bootstrap.handshake_address)
        hello = Hello(role=bootstrap.role, index=bootstrap.index, pid=os.getpid())
        self._outgoing.append((MessageType.HELLO, msgspec.msgpack.encode(hello)))
        self._thread = threading.Thread(target=self._run, args=(socket,), name="handshake", daemon=True)
        self._thread.start()

    def send(self, type: MessageType, record: msgspec.Struct) -> None:
        """Sends a record to the launcher; any thread may call it."""
        self._outgoing.append((type, msgspec.msgpack.encode(record)))
        self._wake()

    def close(self) -> None:
        """Sends what is still to be sent and ends the thread."""
        self._outgoing.append(None)
        self._wake()
        self._thread.join(timeout=2 * LINGER_MS / 1000)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\x00")

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        with socket:
            while True:
                while self._outgoing:
                    item = self._outgoing.popleft()
                    if item is None:
                        return
                    socket.send_multipart([self._stamp.header(item[0]), item[1]])
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                if socket in ready:
                    self._read(socket.recv_multipart())

    def _read(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise BadMessage(f"{len(frames)} frames, expected 2")
            self._receive(self._stamp.read(frames[0]).type, frames[1])
        except Exception as error:  # one bad message must not end the conversation
            logger.warning("a message of the launcher was dropped: %s", error)


def end_context(context: zmq.Context[Any], seconds: float = 2 * LINGER_MS / 1000) -> None:
    """Waits, at most `seconds`, until the closed sockets of `context` have sent what they held.

    A process that exits before that takes its last words with it.
    """
    run_in_time(context.term, seconds, "last-words")
