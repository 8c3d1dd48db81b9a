"""Batch: one step's tokens, flattened over its requests, as host arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from evensong.protocol.step import SchedulerOutput
from evensong.worker.slots import SlotTable

Int64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Batch:
    """`token_ids` and `positions` are [num_tokens]; the rest is one entry a request, in the plan's order.

    `sample_rows` are the rows, among num_tokens, whose next token is sampled, in the order of the plan's
    sampling_request_ids.
    """

    token_ids: Int64
    positions: Int64
    num_query_tokens: list[int]
    num_computed_tokens: list[int]
    block_tables: list[Int64]
    sample_rows: Int64


def build_batch(plan: SchedulerOutput, slots: SlotTable) -> Batch:
    """The batch of a plan; the slots are up to it already."""
    token_ids: list[int] = []
    positions = []
    computed: list[int] = []
    tables: list[Int64] = []
    last_row: dict[str, int] = {}
    for request_id, count in plan.num_scheduled_tokens.items():
        slot = slots[request_id]
        start = slot.num_computed_tokens
        token_ids.extend(slot.tokens[start : start + count])
        positions.append(np.arange(start, start + count, dtype=np.int64))
        computed.append(start)
        tables.append(slot.blocks.ids)
        last_row[request_id] = len(token_ids) - 1
    return Batch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.concatenate(positions) if positions else np.empty(0, dtype=np.int64),
        num_query_tokens=list(plan.num_scheduled_tokens.values()),
        num_computed_tokens=computed,
        block_tables=tables,
        sample_rows=np.array([last_row[request_id] for request_id in plan.sampling_request_ids], dtype=np.int64),
    )
