"""Slots: what the worker keeps of each request between steps. Only the runner changes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import NewRequestData, SchedulerOutput
from evensong.sampling.processors import NO_PROCESSORS, LoadedProcessor, Processors
from evensong.sampling.row import SamplingRow
from evensong.sampling.sampler import changes_logits
from evensong.worker.block_table import BlockTable

Int64 = np.ndarray[Any, np.dtype[np.int64]]


class Slot:
    """One request: its tokens so far, how many of them are computed, and where their keys and values lie."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        block_ids: Sequence[int],
        num_computed_tokens: int,
        prompt_logprobs_delivered: int = 0,
        num_groups: int = 1,
        processors: tuple[LoadedProcessor, ...] = (),
        feed_slot: int = 0,
    ) -> None:
        self.params = params
        self.eos_token_ids = list(eos_token_ids)
        # Where the device leaves its newest token for the next step, and the step that samples that.
        self.feed_slot = feed_slot
        self.sampled_in = -1
        # It got no token where it was to get one.
        self.ended = False
        self.blocks = BlockTable(block_ids, num_groups)
        self.num_computed_tokens = num_computed_tokens
        self._processors = processors
        self._changes_logits = bool(processors) or changes_logits(params)
        self._num_prompt_tokens = len(prompt_token_ids)
        # Row i of the prompt gives the log-probability of token i + 1; the last one samples.
        self._num_rows_to_score = 0 if params.prompt_logprobs is None else len(prompt_token_ids) - 1
        self._num_scored_rows = prompt_logprobs_delivered
        self._num_tokens = len(prompt_token_ids) + len(output_token_ids)
        self._tokens = np.empty(max(64, 2 * self._num_tokens), dtype=np.int64)
        self._tokens[: self._num_prompt_tokens] = prompt_token_ids
        self._tokens[self._num_prompt_tokens : self._num_tokens] = output_token_ids

    @property
    def scores_prompt(self) -> bool:
        """True where log-probabilities of the prompt are asked for."""
        return self._num_rows_to_score > 0

    @property
    def tokens(self) -> Int64:
        """Prompt and output so far: a view. The newest one may be a placeholder, -1 - feed_slot."""
        return self._tokens[: self._num_tokens]

    def append_unknown(self, step_id: int) -> None:
        """A placeholder for the token that step `step_id` samples."""
        if self._num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._num_tokens] = -1 - self.feed_slot
        self._num_tokens += 1
        self.sampled_in = step_id

    def learn(self, step_id: int, token_id: int) -> None:
        """The token that step `step_id` has sampled, whose placeholder is the newest one, or the one before it."""
        self._tokens[self._num_tokens - (1 if step_id == self.sampled_in else 2)] = token_id

    def rows_to_score(self, count: int) -> range:
        """Of the next `count` rows, those whose log-probabilities are asked for and were not delivered before."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + count
        return range(max(start, self._num_scored_rows), min(end, self._num_rows_to_score))

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to know of this request to find the newest token, a placeholder so far."""
        before = self._tokens[: self._num_tokens - 1]
        return SamplingRow(
            self.params,
            before[: self._num_prompt_tokens],
            before[self._num_prompt_tokens :],
            self.eos_token_ids,
            self._changes_logits,
            feed_slot=self.feed_slot,
            processors=self._processors,
        )


class SlotTable:
    """Slots by request id, each with a table of blocks in `num_groups` layer groups."""

    def __init__(self, num_groups: int = 1, processors: Processors = NO_PROCESSORS) -> None:
        self._num_groups = num_groups
        self._processors = processors
        self._slots: dict[str, Slot] = {}
        # Numbers of feed slots that were given back: the same on all ranks, which see the same plans.
        self._free: list[int] = []

    def __getitem__(self, request_id: str) -> Slot:
        return self._slots[request_id]

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, request_id: str) -> Slot | None:
        """The slot that a request has now."""
        return self._slots.get(request_id)

    def apply(self, plan: SchedulerOutput) -> None:
        """Brings the slots up to a plan: releases first, then newcomers, then what grew."""
        for request_id in plan.released_request_ids:
            # A request that was preempted before this rank saw it has no slot yet.
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot.feed_slot)
        for new in plan.new_requests:
            feed_slot = self._free.pop() if self._free else len(self._slots)
            self._slots[new.request_id] = _slot_of(new, self._num_groups, self._processors, feed_slot)
        cached = plan.cached_requests
        for request_id, blocks, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            slot = self._slots[request_id]
            slot.blocks.extend(blocks)
            slot.num_computed_tokens = computed


def _slot_of(new: NewRequestData, num_groups: int, processors: Processors, feed_slot: int) -> Slot:
    return Slot(
        prompt_token_ids=new.prompt_token_ids,
        output_token_ids=new.output_token_ids,
        params=new.params,
        eos_token_ids=new.eos_token_ids,
        block_ids=new.block_ids,
        num_computed_tokens=new.num_computed_tokens,
        prompt_logprobs_delivered=new.prompt_logprobs_delivered,
        num_groups=num_groups,
        processors=processors.chosen(new.params),
        feed_slot=feed_slot,
    )
