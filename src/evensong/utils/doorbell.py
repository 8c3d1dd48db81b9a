"""A doorbell between processes: whoever waits is woken, however often it was rung; and memory without a name.

Both are descriptors that a child inherits. When the last process that holds one is gone, nothing of it is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import tempfile

_ONE = struct.pack("=Q", 1)
_READ_BYTES = 4096


def anonymous_memory(name: str, num_bytes: int) -> int:
    """A descriptor of `num_bytes` zeroed bytes for mmap here and in children; `name` is for people who look at a map.

    Where the system has no memory without a name it is a file that is unlinked already. Raises OSError.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"evensong-{name}", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


class Doorbell:
    """One eventfd, or a pipe where there is none; `fds` are those of another process's doorbell, inherited.

    Writing 8 bytes, the number 1, to `write_fd` rings it from native code.
    """

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        if fds is None:
            fds = _eventfd() if hasattr(os, "eventfd") else _pipe()
        self.read_fd, self.write_fd = fds
        self._poll = select.poll()
        self._poll.register(self.read_fd, select.POLLIN)

    @property
    def fds(self) -> tuple[int, int]:
        """What a child inherits, and makes its own Doorbell of."""
        return self.read_fd, self.write_fd

    def ring(self) -> None:
        """Wakes whoever waits, now or next; never blocks."""
        with contextlib.suppress(BlockingIOError):  # a full pipe has been rung
            os.write(self.write_fd, _ONE)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is rung, and forgets that it was; False when `seconds` have passed."""
        # Reading blocks by itself: one call of the system less where there is no limit.
        if seconds is not None and not self._poll.poll(max(seconds, 0.0) * 1000):
            return False
        os.read(self.read_fd, _READ_BYTES)
        return True

    def close(self) -> None:
        """Closes the descriptors; nobody may use the doorbell any more."""
        for fd in {self.read_fd, self.write_fd}:
            os.close(fd)


def _eventfd() -> tuple[int, int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    return fd, fd


def _pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    return read_end, write_end
