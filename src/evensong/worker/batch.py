"""Batch: one step's tokens, flattened over its requests, as host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evensong.protocol.step import SchedulerOutput
from evensong.worker.slots import SlotTable

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Batch:
    """`token_ids` are [num_tokens]; the rest is one entry a request, in the plan's order.

    `block_tables` are int32 [num_groups, num_blocks]. `sample_rows` are the rows, among num_tokens, whose next token is
    sampled, in the order of the plan's sampling_request_ids. `block_copies`, from and to, come before the forward pass.
    A token that is not known here yet is -1 - its feed slot; step `feed_after` is the last that samples one of those.
    """

    token_ids: Int64
    num_query_tokens: list[int]
    num_computed_tokens: list[int]
    block_tables: list[Int32]
    sample_rows: Int64
    block_copies: Sequence[tuple[int, int]] = ()
    feed_after: int = -1

    def positions(self) -> Int64:
        """The position of each token in its sequence."""
        starts = zip(self.num_query_tokens, self.num_computed_tokens, strict=True)
        parts = [np.arange(start, start + count) for count, start in starts]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def build_batch(plan: SchedulerOutput, slots: SlotTable) -> Batch:
    """The batch of a plan; the slots are up to it already."""
    counts = list(plan.num_scheduled_tokens.values())
    slots_of_rows = [slots[request_id] for request_id in plan.num_scheduled_tokens]
    computed = [slot.num_computed_tokens for slot in slots_of_rows]
    num_tokens = sum(counts)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    last_row: dict[str, int] = {}
    row, feed_after = 0, -1
    for request_id, slot, start, count in zip(plan.num_scheduled_tokens, slots_of_rows, computed, counts, strict=True):
        token_ids[row : row + count] = slot.tokens[start : start + count]
        row += count
        last_row[request_id] = row - 1
        if token_ids[row - 1] < 0:
            feed_after = max(feed_after, slot.sampled_in)
    return Batch(
        token_ids=token_ids,
        num_query_tokens=counts,
        num_computed_tokens=computed,
        block_tables=[slot.blocks.ids for slot in slots_of_rows],
        sample_rows=np.array([last_row[request_id] for request_id in plan.sampling_request_ids], dtype=np.int64),
        block_copies=plan.block_copies,
        feed_after=feed_after,
    )
