"""Launch: builds, starts, watches and stops the processes of one engine (spec B1, C3, D5).

In `serve` it runs in the launcher; in library use (LLM, AsyncLLM) the same code runs in the caller's process.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from evensong.config.sections import EngineConfig, ServerConfig, for_terminal
from evensong.engine.launch_board import READY, Board, Key
from evensong.engine.launch_child import start_child
from evensong.engine.launch_handshake import HandshakeThread, OnChange
from evensong.engine.launch_table import CORE, HTTP, LIMITS, PROCESS_TABLE, Limits, ProcessRow
from evensong.protocol.errors import EngineStartError, EvensongError
from evensong.protocol.handshake import Bootstrap, ClientAddress, CoreInit, HttpInit, Membership
from evensong.protocol.kv_spec import Resources
from evensong.protocol.wire import TOKEN_BYTES, Stamp
from evensong.utils.child import Child
from evensong.utils.progress import NO_PAGE, make_page
from evensong.utils.sockets import LaunchFolder

FIRST_INCARNATION = 1


def _nobody(membership: Membership, fault: EvensongError | None) -> None:
    """Where nobody listens to changes."""


class Launch:
    """One engine's processes. Making it starts none; `start_http` and `start_core` do; `close` ends them all.

    `on_change(membership, fault)` is called, on the launch's own thread, after every change of either; it must return
    soon and must not call `close`. Raises EngineStartError when there is no place for the sockets.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_change: OnChange = _nobody,
        *,
        table: Mapping[str, ProcessRow] = PROCESS_TABLE,
        limits: Limits = LIMITS,
    ) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._config = msgspec.Raw(msgspec.msgpack.encode(for_terminal(config)))
        self._server = msgspec.Raw(msgspec.msgpack.encode(None))
        self._table = table
        self._limits = limits
        self._children: dict[Key, Child] = {}
        self._closed = threading.Lock()
        self._owner = os.getpid()
        self._board = Board(limits)
        try:
            self._folder = LaunchFolder()
        except OSError as error:
            raise EngineStartError(f"no folder for the engine's sockets: {error}") from error
        self._progress_fd = make_page()
        self.client = ClientAddress(0, self._folder.address("requests-0"), self._folder.address("outputs-0"))
        self._address = self._folder.address("handshake")
        try:
            stamp = Stamp(self.token, 0, 0)
            self._handshake = HandshakeThread(self._address, stamp, self._board, self._init, on_change, self._kill)
        except BaseException as error:
            self._folder.remove()
            self._close_page()
            if isinstance(error, (zmq.ZMQError, OSError)):
                raise EngineStartError(f"no socket for the engine's processes: {error}") from error
            raise

    @property
    def membership(self) -> Membership:
        """Every core and its state, as front ends see it."""
        return self._board.membership()

    @property
    def fault(self) -> EvensongError | None:
        """The first failure of a process; None while all is well."""
        return self._board.fault

    def is_ready(self, role: str) -> bool:
        """True when every process of `role` that was started can take requests."""
        return set(self._board.states(role).values()) == {READY}

    @property
    def num_dropped(self) -> int:
        """Handshake messages that were not ours or not in order."""
        return self._handshake.num_dropped

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that live, by title."""
        return {child.title: child.pid for child in list(self._children.values()) if child.alive}

    def start_http(self, server: ServerConfig, listener: socket.socket) -> None:
        """Starts the HTTP process on a socket that listens already."""
        self._server = msgspec.Raw(msgspec.msgpack.encode(server))
        fd = listener.fileno()
        self._start(HTTP, 0, ("--listen-fd", str(fd)), (fd,))

    def start_core(self) -> None:
        """Starts the engine core; `wait_ready` or `on_change` tell how it went."""
        self._start(CORE, 0)

    def wait_ready(self) -> Resources:
        """Blocks until the core takes requests; raises EngineStartError or ConfigError in one line."""
        return self._board.wait_ready()[0]

    def set_phase(self, phase: str) -> None:
        """What start-up is busy with; published to front ends."""
        self._handshake.post(lambda: self._board.change(phase=phase))

    def drain(self, seconds: float) -> None:
        """Front ends refuse new requests from now on, and end when what runs is done, at latest after `seconds`."""
        self._handshake.post(lambda: self._handshake.drain(seconds))

    def wait_gone(self, role: str, timeout: float) -> bool:
        """Waits until no process of `role` lives, at most `timeout` seconds; True if none does."""
        until = time.monotonic() + timeout
        chosen = [child for (kind, _), child in list(self._children.items()) if kind == role]
        return all(child.join(until - time.monotonic()) for child in chosen)

    def close(self, seconds: float = 0.0) -> None:
        """Ends every process and frees everything. What runs may take `seconds` more, then a bound, then SIGKILL.

        Safe to call twice, from any thread but the launch's own; does nothing in a forked copy of the caller.
        """
        if os.getpid() != self._owner or not self._closed.acquire(blocking=False):
            return
        try:
            self._board.change(closing=True)
            self._handshake.post(lambda: self._say_shutdown(seconds))
            until = time.monotonic() + seconds + self._limits.exit
            for child in list(self._children.values()):
                child.join(min(seconds, until - time.monotonic()))
            for child in list(self._children.values()):
                child.terminate()
            for child in list(self._children.values()):
                child.join(until - time.monotonic())
        finally:
            self.force()

    def force(self) -> None:
        """Ends every process at once, without asking, and frees everything; safe after an interrupted `close`."""
        self._closed.acquire(blocking=False)
        self._board.change(closing=True)
        for child in list(self._children.values()):
            child.kill()
        for child in list(self._children.values()):
            child.join(self._limits.exit)
            child.release()
        self._handshake.stop()
        self._folder.remove()
        self._close_page()

    def _say_shutdown(self, seconds: float) -> None:
        for key in list(self._children):
            self._handshake.send_shutdown(key, seconds)

    def _close_page(self) -> None:
        fd, self._progress_fd = self._progress_fd, NO_PAGE
        if fd != NO_PAGE:
            os.close(fd)

    def _start(self, role: str, index: int, arguments: Sequence[str] = (), fds: Sequence[int] = ()) -> None:
        row = self._table[role]
        key = (role, index)
        title = row.title.format(index=index)
        bootstrap = Bootstrap(self.token, self._address, role, index, FIRST_INCARNATION)
        self._board.add(role, index, title, FIRST_INCARNATION)
        # Wakes the thread, which then waits until the new deadline and no longer.
        self._handshake.post(lambda: None)
        if self._progress_fd != NO_PAGE:
            fds = (*fds, self._progress_fd)
        self._children[key] = start_child(
            title, row.module, bootstrap, lambda child: self._exited(key, child), arguments, fds
        )

    def _exited(self, key: Key, child: Child) -> None:
        self._handshake.post(lambda: self._handshake.exited(key, child.ending()))

    def _kill(self, key: Key) -> None:
        if (child := self._children.get(key)) is not None:
            child.kill()

    def _init(self, key: Key) -> msgspec.Raw:
        role, _ = key
        if role == HTTP:
            settings: CoreInit | HttpInit = HttpInit(
                self._config, self.client, server=self._server, progress_fd=self._progress_fd
            )
        else:
            settings = CoreInit(self._config, [self.client], progress_fd=self._progress_fd)
        return msgspec.Raw(msgspec.msgpack.encode(settings))


def open_launch(config: EngineConfig, on_change: OnChange) -> Launch:
    """The launch of a library caller, none of its processes started yet; clients find it by name."""
    return Launch(config, on_change)
