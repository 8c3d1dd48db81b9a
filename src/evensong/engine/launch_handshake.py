"""The launcher's side of the handshake: one thread that owns the ROUTER socket and is the only writer of the board.

Other threads hand it work through `post`; it tells `on_change` after every change of the board.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from evensong.engine.launch_board import CONNECTED, READY, Board, Key
from evensong.engine.launch_table import HTTP
from evensong.protocol.errors import EvensongError
from evensong.protocol.handshake import Failed, Hello, Membership, Ready
from evensong.protocol.wire import BadMessage, Codec, MessageType, Stamp

# How long the last words of a child that is gone may still be under way.
LAST_WORDS_MS = 100
OnChange = Callable[[Membership, EvensongError | None], None]


class HandshakeThread:
    """Serves the handshake at `address` until `stop()`. `init(key)` gives the INIT payload of a child that said HELLO.

    `on_late(key)` is called for a child that took too long. Raises zmq.ZMQError if the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        stamp: Stamp,
        board: Board,
        init: Callable[[Key], msgspec.Raw],
        on_change: OnChange,
        on_late: Callable[[Key], None],
    ) -> None:
        self.num_dropped = 0
        self._stamp = stamp
        self._board = board
        self._init = init
        self._on_change = on_change
        self._on_late = on_late
        self._drain_until: float | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.bind(address)
            self._thread = threading.Thread(target=self._run, name="evensong launch", daemon=True)
            self._thread.start()
        except BaseException:
            self._close_sockets()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Runs `work` on this thread, then publishes what it changed."""
        self._work.put(work)
        self._wake()

    def drain(self, seconds: float) -> None:
        """Tells front ends, those too that say HELLO later, to refuse what is new and to end. On this thread only."""
        self._drain_until = time.monotonic() + seconds
        self._board.change(draining=True)
        for key in self._board.states(HTTP):
            self.send_shutdown(key, seconds)

    def send_shutdown(self, key: Key, seconds: float) -> None:
        """Asks a child to end; what it runs may take `seconds` more. Call it on this thread only (`post`)."""
        self._send(key, MessageType.SHUTDOWN, msgspec.msgpack.encode(seconds))

    def stop(self) -> None:
        """Ends the thread and closes its socket; safe to call twice and from the thread itself."""
        self._work.put(None)
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        # A full buffer means that the thread has been woken already; a closed one that it has ended.
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def _close_sockets(self) -> None:
        self._context.destroy(linger=0)
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # Without this thread nobody would notice anything any more; whoever waits must hear of it.
            self._board.broken(f"the launch's own thread failed: {error!r}")
            with contextlib.suppress(Exception):
                self._on_change(self._board.membership(), self._board.fault)
        finally:
            self._close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        known = self._snapshot()
        while True:
            deadline = self._board.next_deadline()
            wait = None if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1000) + 1
            if self._wake_read.fileno() in dict(poller.poll(wait)):
                self._wake_read.recv(4096)
            self._read_all()
            if not self._do_work():
                return
            for key in self._board.expire(time.monotonic()):
                self._on_late(key)
            if (now := self._snapshot()) != known:
                known = now
                self._publish(now[0])
                self._on_change(*now[:2])

    def _snapshot(self) -> tuple[Membership, EvensongError | None, dict[Key, str]]:
        return self._board.membership(), self._board.fault, self._board.states(HTTP)

    def _do_work(self) -> bool:
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._work.get_nowait()
                if work is None:
                    return False
                work()
        return True

    def exited(self, key: Key, ending: str) -> None:
        """A child is gone: hears its last words first, since they say more than its exit code. On this thread only."""
        slot = self._board.slot(key)
        if slot is not None and slot.state != READY and self._router.poll(LAST_WORDS_MS):
            self._read_all()
        self._board.exited(key, ending)

    def _read_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
                try:
                    self._read(frames)
                except BadMessage:
                    self.num_dropped += 1

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise BadMessage(f"{len(frames)} frames, expected 3")
        identity, head, payload = frames
        header = self._stamp.read(head)
        if header.type == MessageType.HELLO:
            hello = Codec(Hello).decode(payload)
            key = (hello.role, hello.index)
            slot = self._board.slot(key)
            if slot is None or slot.incarnation != header.incarnation or not self._board.hello(key, identity):
                raise BadMessage(f"unexpected HELLO of {hello.role} {hello.index}")
            self._send(key, MessageType.INIT, self._init(key))
            if hello.role == HTTP:
                self._send(key, MessageType.MEMBERSHIP, msgspec.msgpack.encode(self._board.membership()))
                if self._drain_until is not None:
                    self.send_shutdown(key, max(0.0, self._drain_until - time.monotonic()))
            return
        known = self._board.find(identity, header.incarnation)
        if known is None:
            raise BadMessage("message of a process that has not said HELLO")
        if header.type == MessageType.READY:
            self._board.ready(known, Codec(Ready).decode(payload).resources)
        elif header.type == MessageType.FAILED:
            self._board.failed(known, Codec(Failed).decode(payload))
        else:
            raise BadMessage(f"unexpected {header.type.name}")

    def _publish(self, membership: Membership) -> None:
        payload = msgspec.msgpack.encode(membership)
        for key in self._board.states(HTTP):
            self._send(key, MessageType.MEMBERSHIP, payload)

    def _send(self, key: Key, type: MessageType, payload: bytes | msgspec.Raw) -> None:
        slot = self._board.slot(key)
        if slot is None or slot.state not in (CONNECTED, READY):
            return
        # A child that can no longer be reached is gone, and its end is noticed by its process.
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([slot.identity, self._stamp.header(type), bytes(payload)], zmq.NOBLOCK)
