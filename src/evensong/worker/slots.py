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
    ) -> None:
        self.params = params
        self.eos_token_ids = list(eos_token_ids)
        self.blocks = BlockTable(block_ids, num_groups)
        self.num_computed_tokens = num_computed_tokens
        self._processors = processors
        self._changes_logits = bool(processors) or changes_logits(params)
        self._constrained = params.structured_outputs is not None or params.thinking_token_budget is not None
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
        """Prompt and output so far: a view."""
        return self._tokens[: self._num_tokens]

    def append(self, token_id: int) -> None:
        """The token that was just sampled."""
        if self._num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1

    def rows_to_score(self, count: int) -> range:
        """Of the next `count` rows, those whose log-probabilities are asked for and were not delivered before."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + count
        return range(max(start, self._num_scored_rows), min(end, self._num_rows_to_score))

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to know of this request."""
        prompt, output = self.tokens[: self._num_prompt_tokens], self.tokens[self._num_prompt_tokens :]
        return SamplingRow(
            self.params,
            prompt,
            output,
            self.eos_token_ids,
            self._changes_logits,
            self._constrained,
            processors=self._processors,
        )


class SlotTable:
    """Slots by request id, each with a table of blocks in `num_groups` layer groups."""

    def __init__(self, num_groups: int = 1, processors: Processors = NO_PROCESSORS) -> None:
        self._num_groups = num_groups
        self._processors = processors
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
            self._slots[new.request_id] = _slot_of(new, self._num_groups, self._processors)
        cached = plan.cached_requests
        for request_id, blocks, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            slot = self._slots[request_id]
            slot.blocks.extend(blocks)
            slot.num_computed_tokens = computed


def _slot_of(new: NewRequestData, num_groups: int, processors: Processors) -> Slot:
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
    )
