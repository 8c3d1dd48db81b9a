"""Everything that a multiprocess client must free, in one callable (spec C3).

It holds no reference to its client, so `weakref.finalize(client, resources)` frees all when the client is collected,
at exit, on `shutdown()`, or when the client's construction fails half way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq

from evensong.engine.client.mp_channel import CoreLaunch
from evensong.protocol.errors import EngineDeadError


class BackgroundResources:
    """Call it to free what was put into it; safe to call twice, and does nothing in a forked copy of the owner."""

    def __init__(self, fail: Callable[[EngineDeadError], None]) -> None:
        self.launch: CoreLaunch | None = None
        self.context: zmq.Context[Any] | None = None
        self.reader: threading.Thread | None = None
        self.wake: socket.socket | None = None
        self.stop_tasks: Callable[[], None] | None = None
        self._fail = fail
        self._owner = os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self._owner:
            return
        # Waiters first: nobody may hang on an engine that is about to go.
        self._fail(EngineDeadError("the engine was shut down"))
        try:
            if self.launch is not None:
                self.launch.close()
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self.wake is not None:
            # The reader polls the other end: closing this one ends it.
            self.wake.close()
        if self.reader is not None and self.reader is not threading.current_thread():
            self.reader.join()
        if self.stop_tasks is not None:
            self.stop_tasks()
            self.stop_tasks = None
        if self.context is not None:
            # The loop that an asyncio socket was registered with may be closed already.
            with contextlib.suppress(RuntimeError, zmq.ZMQError):
                self.context.destroy(linger=0)
            self.context = None
