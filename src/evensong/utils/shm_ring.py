"""A ring of bytes in shared memory: one process writes messages, many read all of them, in order.

The memory has no name (utils/doorbell.py::anonymous_memory) and begins with a page of positions, in bytes since the
ring was made: the writer's, and each reader's in a cache line of its own. A message lies in fragments, each a word
(its length, and whether more follow) and bytes up to the next multiple of 8. A writer waits until the slowest reader
has made room; who has nothing to read sleeps at its doorbell.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

from evensong.utils.doorbell import Doorbell, anonymous_memory

RING_BYTES = 2**20
_PAGE = 4096
_WORD = 8
_WORDS_PER_LINE = 8
MAX_READERS = _PAGE // (_WORD * _WORDS_PER_LINE) - 1
# A ring that is full is rare: a reader lags far behind, or a message is larger than the ring.
_FULL_SECONDS = 0.0001
_FENCE = threading.Lock()


class RingClosed(RuntimeError):
    """The ring was closed while a writer waited for room."""


def make_ring(name: str, num_bytes: int = RING_BYTES) -> int:
    """The descriptor of an empty ring with room for `num_bytes` (a multiple of 4096). Raises OSError."""
    assert num_bytes % _PAGE == 0 and num_bytes > 0, "whole pages"
    return anonymous_memory(name, _PAGE + num_bytes)


class _Ring:
    """The memory as both sides see it."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        whole = memoryview(self._map)
        self.positions = whole[:_PAGE].cast("Q")
        self.data = whole[_PAGE:]
        self.words = self.data.cast("Q")
        self.capacity = len(self.data)
        whole.release()

    def close(self) -> None:
        for view in (self.positions, self.words, self.data):
            view.release()
        self._map.close()


class RingWriter:
    """The one writer; `doorbells` are its readers', in order of their indices. Used by one thread, but for `close`.

    `while_full` is called now and then while a reader must make room: a reader may wait for this process itself.
    """

    def __init__(self, fd: int, doorbells: Sequence[Doorbell], while_full: Callable[[], object] = bool) -> None:
        assert 0 < len(doorbells) <= MAX_READERS, "a ring has readers"
        self._ring = _Ring(fd)
        self._doorbells = tuple(doorbells)
        self._while_full = while_full
        self._largest = self._ring.capacity // 2 - _WORD
        self._written = int(self._ring.positions[0])
        # Up to here the readers are known to have made room.
        self._limit = self._written
        self._closed = False

    def send(self, payload: bytes | bytearray, seconds: float) -> None:
        """Writes one message of any size.

        Raises TimeoutError when a reader makes no room for `seconds`, and RingClosed; the ring is of no use then.
        """
        view, first, more = memoryview(payload), 0, True
        while more:
            length = min(len(view) - first, self._largest)
            more = first + length < len(view)
            self._put(view[first : first + length], more, seconds)
            first += length

    def unread(self) -> list[int]:
        """Indices of the readers that have not come back for more since the last message."""
        positions, own = self._ring.positions, range(len(self._doorbells))
        return [index for index in own if positions[(1 + index) * _WORDS_PER_LINE] != self._written]

    def close(self) -> None:
        """From any thread: a writer that waits for room gives up."""
        self._closed = True

    def release(self) -> None:
        """Unmaps the memory; nothing is sent any more."""
        self._ring.close()

    def _put(self, part: memoryview, more: bool, seconds: float) -> None:
        ring, length = self._ring, len(part)
        end = self._written + _WORD + _padded(length)
        if end > self._limit:
            self._wait_for_room(end, seconds)
        place = self._written % ring.capacity
        ring.words[place // _WORD] = length << 1 | more
        place = (place + _WORD) % ring.capacity
        before_end = min(length, ring.capacity - place)
        ring.data[place : place + before_end] = part[:before_end]
        if before_end < length:
            ring.data[: length - before_end] = part[before_end:]
        fence()
        self._written = end
        ring.positions[0] = end
        for doorbell in self._doorbells:
            doorbell.ring()

    def _wait_for_room(self, end: int, seconds: float) -> None:
        until = None
        while True:
            slowest, reader = min(
                (int(self._ring.positions[(1 + index) * _WORDS_PER_LINE]), index)
                for index in range(len(self._doorbells))
            )
            self._limit = slowest + self._ring.capacity
            if end <= self._limit:
                fence()
                return
            if self._closed:
                raise RingClosed("the ring was closed")
            now = time.monotonic()
            until = now + seconds if until is None else until
            if now >= until:
                raise TimeoutError(f"reader {reader} has made no room in {seconds:g} s")
            self._while_full()
            time.sleep(_FULL_SECONDS)


class RingReader:
    """Reader number `index`: sees every message, from the first on. Used by one thread."""

    def __init__(self, fd: int, index: int = 0) -> None:
        self._ring = _Ring(fd)
        self._own = (1 + index) * _WORDS_PER_LINE
        self._taken = int(self._ring.positions[self._own])
        self._parts = bytearray()

    def receive(self) -> memoryview | bytes | None:
        """The next message, None when there is none now; what was received before is no longer valid then.

        Whoever is woken by the doorbell calls this until it says None.
        """
        ring = self._ring
        if ring.positions[self._own] != self._taken:
            fence()
            ring.positions[self._own] = self._taken
        while self._taken != ring.positions[0]:
            fence()
            place = self._taken % ring.capacity
            word = int(ring.words[place // _WORD])
            length, more = word >> 1, word & 1
            self._taken += _WORD + _padded(length)
            place = (place + _WORD) % ring.capacity
            end = place + length
            if not more and not self._parts and end <= ring.capacity:
                return ring.data[place:end]
            self._parts += ring.data[place : min(end, ring.capacity)]
            if end > ring.capacity:
                self._parts += ring.data[: end - ring.capacity]
            fence()
            ring.positions[self._own] = self._taken
            if not more:
                message = bytes(self._parts)
                self._parts.clear()
                return message
        return None

    def release(self) -> None:
        """Unmaps the memory."""
        self._ring.close()


def fence() -> None:
    """What this process wrote or read before comes before what it does after, for other processors too.

    Releasing a lock and taking it again orders both sides; x86 would need nothing.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass


def _padded(length: int) -> int:
    return -(-length // _WORD) * _WORD
