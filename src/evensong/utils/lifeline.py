"""The lifeline: a pipe from the parent. Its first bytes are the child's orders; its end means the parent is gone."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import sys
import threading

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20
PARENT_GONE = 3
PARENT_CHECK_MS = 1000
# PR_SET_PDEATHSIG of linux/prctl.h
_SET_DEATH_SIGNAL = 1


def read_orders(fd: int) -> bytes:
    """The first message on the lifeline; raises EOFError when the parent went before it was whole."""
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))
    if length > _MAX_BYTES:
        raise EOFError(f"orders of {length} bytes")
    return _read_exactly(fd, length)


def watch(fd: int) -> None:
    """From now on this process ends at once, whatever it does, when the parent is gone."""

    parent = os.getppid()

    def wait() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        # A forked copy of the parent may hold the other end open after the parent itself has gone; then this process
        # has been given to another parent.
        while os.getppid() == parent:
            if poll.poll(PARENT_CHECK_MS) and not os.read(fd, 4096):
                break
        os._exit(PARENT_GONE)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def be_killed_with_parent_thread() -> None:
    """On Linux the kernel kills this process when the thread that started it ends, even if this one is stopped.

    Only for children of a thread that lives as long as its process, as the main one does. prctl(2).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            raise EOFError("the parent is gone")
        data += part
    return data
