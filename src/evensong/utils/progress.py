"""The progress page of a core: figures in shared memory that say whether its steps come forward.

The core writes, any process that inherited the page reads, at any time and without a message. Every figure is one
aligned 8-byte word, so that a reader never sees half of one.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum

PAGE_BYTES = mmap.PAGESIZE
NO_PAGE = -1
_STEPS, TICKS_WORD, LAST_WORD, _STATE, _TOKENS = range(5)


class CoreState(IntEnum):
    """What a core does with new work."""

    OPEN = 0
    PAUSED = 1
    ASLEEP = 2


class ProgressPage:
    """Figures of one core. `fd` is that of `make_page`, or NO_PAGE for a page that nobody else sees."""

    def __init__(self, fd: int = NO_PAGE) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")

    # ---- the core writes

    def tick(self) -> None:
        """A step comes forward."""
        self._words[TICKS_WORD] += 1
        self._words[LAST_WORD] = time.monotonic_ns()

    def step_begins(self, num_tokens: int) -> None:
        """A step over so many tokens begins."""
        self._words[_TOKENS] = num_tokens
        self.tick()

    def step_done(self) -> None:
        """A step has ended."""
        self._words[_STEPS] += 1
        self._words[_TOKENS] = 0
        self.tick()

    def set_state(self, state: CoreState) -> None:
        """Whether it takes steps at all."""
        self._words[_STATE] = state

    @property
    def words(self) -> memoryview:
        """All figures: native code moves TICKS_WORD and LAST_WORD (nanoseconds of the monotonic clock) itself."""
        return self._words

    # ---- others read

    @property
    def num_steps(self) -> int:
        """Steps that have ended since the core began."""
        return int(self._words[_STEPS])

    @property
    def num_ticks(self) -> int:
        """How often a step came forward."""
        return int(self._words[TICKS_WORD])

    @property
    def num_tokens(self) -> int:
        """Tokens of the step that runs now; 0 between steps."""
        return int(self._words[_TOKENS])

    @property
    def state(self) -> CoreState:
        """What it does with new work."""
        return CoreState(self._words[_STATE])

    @property
    def seconds_still(self) -> float:
        """Seconds since it last came forward; the clock is the same in all processes of a machine."""
        return max(time.monotonic_ns() - int(self._words[LAST_WORD]), 0) / 1e9

    def close(self) -> None:
        """Unmaps the page; safe to call twice."""
        self._words.release()
        self._map.close()


def make_page() -> int:
    """A descriptor of zeroed shared memory without a name, for ProgressPage here and in children; NO_PAGE where the
    system has none.
    """
    if not hasattr(os, "memfd_create"):
        return NO_PAGE
    fd = os.memfd_create("evensong-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd
