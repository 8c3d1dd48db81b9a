"""BlockTable: a request's KV blocks in order of position, as an array that grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class BlockTable:
    """Block ids; `ids` is a view of those that are set."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._array = np.empty(max(16, 2 * len(block_ids)), dtype=np.int64)
        self._count = 0
        self.extend(block_ids)

    @property
    def ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The block ids so far."""
        return self._array[: self._count]

    def extend(self, block_ids: Sequence[int]) -> None:
        """Blocks for the next positions."""
        end = self._count + len(block_ids)
        if end > len(self._array):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[: self._count] = self.ids
            self._array = grown
        self._array[self._count : end] = block_ids
        self._count = end
