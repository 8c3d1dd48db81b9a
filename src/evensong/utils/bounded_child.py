"""Child processes that do one piece of foreign work, within limits that the kernel keeps, and end.

The parent writes one order to the child's stdin and leaves the pipe open: its end tells the child that the parent has
gone. The child writes its answer to stdout.
"""

from __future__ import annotations

import os
import resource
import struct
import sys

from setproctitle import setproctitle

from evensong.utils import lifeline

_LENGTH = struct.Struct("<I")


def environment() -> dict[str, str]:
    """This process's environment without its secrets, which the child has no use for."""
    return {name: value for name, value in os.environ.items() if not name.endswith(("_KEY", "_TOKEN"))}


def framed(order: bytes) -> bytes:
    """An order as `take_order` reads it."""
    return _LENGTH.pack(len(order)) + order


def take_order(title: str, *, cpu_seconds: int, memory_bytes: int) -> bytes:
    """In the child: sets its limits and its title, and reads its order; it ends when its parent has gone.

    Past the limits the kernel ends the process, or takes its next allocation away; nothing here decides.
    """
    setproctitle(title)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    (length,) = _LENGTH.unpack(sys.stdin.buffer.read(_LENGTH.size))
    order = sys.stdin.buffer.read(length)
    lifeline.watch(sys.stdin.fileno())
    return order
