"""The memory that the ranks of one replica on one host share: an anonymous file, and where in it each thing lies.

Whoever starts the ranks makes the file, empty, and hands each its descriptor. The first to open it gives it its size;
pages come as they are used. What lies in a region is the business of who uses it; all begin as zeros.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from evensong.distributed.grid import RankGrid

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PAGE = 4096
# What the ranks write so that they find each other, before they exchange anything.
MEETING_BYTES = _PAGE


@dataclass(frozen=True)
class LinkSizes:
    """Bytes of each kind of region; 0: there is none.

    The feed table of the replica, what the parts of a stage exchange, the last stage's logits, and what one part of a
    stage hands to the next.
    """

    feed: int
    group: int = 0
    logits: int = 0
    channel: int = 0


@dataclass(frozen=True)
class Region:
    """Where something lies in the shared memory, in bytes."""

    offset: int
    size: int


class LinksLayout:
    """The regions of a grid's memory, each at a page of its own."""

    def __init__(self, grid: RankGrid, sizes: LinkSizes) -> None:
        parts, stages = grid.tensor_parallel_size, grid.pipeline_parallel_size
        self._end = 0
        self.meeting = self._next(MEETING_BYTES)
        self.feed = self._next(sizes.feed)
        self.groups = [self._next(sizes.group if parts > 1 else 0) for _ in range(stages)]
        self.logits = self._next(sizes.logits if parts > 1 else 0)
        # By the stage that sends, and the part.
        self.channels = [[self._next(sizes.channel) for _ in range(parts)] for _ in range(stages - 1)]

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self._end

    def _next(self, size: int) -> Region:
        region = Region(self._end, size)
        self._end += -(-size // _PAGE) * _PAGE
        return region


class Links:
    """The memory, mapped. It stays mapped for as long as anybody has a view of it."""

    def __init__(self, fd: int, layout: LinksLayout) -> None:
        if os.fstat(fd).st_size < layout.total:
            os.ftruncate(fd, layout.total)
        self._whole: Bytes = np.frombuffer(mmap.mmap(fd, layout.total), np.uint8)

    def view(self, region: Region) -> Bytes:
        """The region's bytes, shared with all ranks."""
        return self._whole[region.offset : region.offset + region.size]
