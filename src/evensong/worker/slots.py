"""Slots: what the worker keeps of each request between steps. Only the runner changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import NewRequestData, SchedulerOutput
from evensong.sampling.row import SamplingRow
from evensong.worker.block_table import BlockTable

Int64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Slot:
    """One request: its tokens so far, how many of them are computed, and where their keys and values lie."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    blocks: BlockTable
    num_computed_tokens: int
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.prompt_token_ids + self.output_token_ids

    def append(self, token_id: int) -> None:
        """The token that was just sampled."""
        self.output_token_ids.append(token_id)
        self.tokens.append(token_id)

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to know of this request."""
        return SamplingRow(self.params, self.prompt_token_ids, self.output_token_ids, self.eos_token_ids)


class SlotTable:
    """Slots by request id."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}

    def __getitem__(self, request_id: str) -> Slot:
        return self._slots[request_id]

    def __len__(self) -> int:
        return len(self._slots)

    def apply(self, plan: SchedulerOutput) -> None:
        """Brings the slots up to a plan: releases first, then newcomers, then what grew."""
        for request_id in plan.released_request_ids:
            # A request that was preempted before this rank saw it has no slot yet.
            self._slots.pop(request_id, None)
        for new in plan.new_requests:
            self._slots[new.request_id] = _slot_of(new)
        cached = plan.cached_requests
        for request_id, blocks, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            slot = self._slots[request_id]
            slot.blocks.extend(blocks)
            slot.num_computed_tokens = computed


def _slot_of(new: NewRequestData) -> Slot:
    return Slot(
        prompt_token_ids=list(new.prompt_token_ids),
        output_token_ids=list(new.output_token_ids),
        params=new.params,
        eos_token_ids=list(new.eos_token_ids),
        blocks=BlockTable(new.block_ids),
        num_computed_tokens=new.num_computed_tokens,
    )
