"""The feed table as Python sees it: tokens that one rank samples and others compute with (native/src/feed.h).

Native steps wait for it by themselves; ranks whose steps Python runs look at it here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from evensong.distributed.links import Bytes

HEAD_BYTES = 64
TOKEN_BYTES = 8
_POLL_SECONDS = 0.0002


def token_table_bytes(num_slots: int) -> int:
    """Bytes of a table with so many feed slots."""
    return HEAD_BYTES + TOKEN_BYTES * num_slots


class TokenTable:
    """Over memory that the ranks share: one rank publishes, in the order of steps, and all read."""

    def __init__(self, memory: Bytes) -> None:
        # One more than the step up to which all tokens are there.
        self._published = memory[:8].view(np.uint64)
        self._tokens = memory[HEAD_BYTES:].view(np.int64)

    def publish(self, step_id: int, tokens: Mapping[int, int]) -> None:
        """Leaves `tokens` by feed slot, then says that those of all steps up to `step_id` are there."""
        for slot, token_id in tokens.items():
            self._tokens[slot] = token_id
        self._published[0] = max(int(self._published[0]), step_id + 1)

    def resolve(self, token_ids: np.ndarray, after: int, timeout: float) -> np.ndarray:
        """`token_ids` int64 with -1 - slot replaced by the slot's token, once step `after` is published.

        Raises TimeoutError.
        """
        named = token_ids < 0
        if not named.any():
            return token_ids
        ends = time.monotonic() + timeout
        while int(self._published[0]) <= after:
            if time.monotonic() > ends:
                raise TimeoutError(f"the tokens of step {after} did not come within {timeout:.0f} s")
            time.sleep(_POLL_SECONDS)
        return np.where(named, self._tokens[np.where(named, -1 - token_ids, 0)], token_ids)
