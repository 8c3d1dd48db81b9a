"""BlockTable: a request's KV blocks in order of position, as an array that grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class BlockTable:
    """Block ids; `ids` is a view of those that are set."""

    def __init__(self, block_ids: Sequence[int], num_groups: int = 1) -> None:
        self._array = np.empty((num_groups, max(16, 2 * len(block_ids) // num_groups)), dtype=np.int32)
        self._count = 0
        self.extend(block_ids)

    @property
    def ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The block ids so far, [num_groups, num_blocks]."""
        return self._array[:, : self._count]

    def extend(self, block_ids: Sequence[int]) -> None:
        """Blocks for the next positions, those of all groups side by side."""
        if not block_ids:
            return
        num_groups, capacity = self._array.shape
        end = self._count + len(block_ids) // num_groups
        if end > capacity:
            grown = np.empty((num_groups, 2 * end), dtype=np.int32)
            grown[:, : self._count] = self.ids
            self._array = grown
        self._array[:, self._count : end] = np.array(block_ids, dtype=np.int32).reshape(-1, num_groups).T
        self._count = end
