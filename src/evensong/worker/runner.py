"""Runner: turns plans into steps of the device and its results into tokens. The only writer of the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.output import PromptScores
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.sampling.processors import NO_PROCESSORS, Processors
from evensong.sampling.row import Bitmask
from evensong.sampling.sampler import Sampled
from evensong.worker.batch import Batch, build_batch
from evensong.worker.device import NO_MASKS, Device, num_probe_blocks
from evensong.worker.prompt_scores import Wanted, score_prompts, wanted_scores
from evensong.worker.slots import SlotTable


class Runner:
    """One device and its requests. `execute` and `sample` alternate, one of each a step."""

    def __init__(self, device: Device, kv_cache: KVCacheConfig, processors: Processors = NO_PROCESSORS) -> None:
        self._device = device
        self._kv_cache = kv_cache
        self._slots = SlotTable(len(kv_cache.groups), processors)
        self._plan: SchedulerOutput | None = None
        self._wanted: list[Wanted] = []
        self._runs = False

    def execute(self, plan: SchedulerOutput) -> None:
        """Starts the forward pass of `plan`, and the sampling of its rows."""
        self._slots.apply(plan)
        batch = build_batch(plan, self._slots)
        self._runs = len(batch.token_ids) > 0
        if self._runs:
            rows = [self._slots[request_id].sampling_row() for request_id in plan.sampling_request_ids]
            self._device.start(batch, rows)
        self._wanted = wanted_scores(plan, self._slots)
        for request_id, count in plan.num_scheduled_tokens.items():
            self._slots[request_id].num_computed_tokens += count
        self._plan = plan

    def sample(self, bitmask: GrammarBitmask | None = None) -> ModelOutput:
        """Tokens for the rows of the last plan that sample, each appended to its slot; `bitmask` allows some alone."""
        assert self._plan is not None, "sample without execute"
        plan, self._plan = self._plan, None
        output = ModelOutput(list(plan.sampling_request_ids), [], [])
        results = self._device.finish(_masks(output.request_ids, bitmask)) if self._runs else []
        output.prompt_scores, output.errors = self._scores()
        for request_id, result in zip(output.request_ids, results, strict=True):
            self._take(request_id, result, output)
        return output

    def _take(self, request_id: str, result: Sampled, output: ModelOutput) -> None:
        tokens = [] if result.error is not None or result.exhausted else [result.token_id]
        if result.error is not None:
            output.errors[request_id] = result.error
        elif result.exhausted:
            output.exhausted.append(request_id)
        else:
            self._slots[request_id].append(result.token_id)
        output.sampled_token_ids.append(tokens)
        output.logprobs.append([result.logprobs] if tokens and result.logprobs is not None else None)

    def _scores(self) -> tuple[dict[str, PromptScores], dict[str, str]]:
        return score_prompts(self._device, self._wanted) if self._wanted else ({}, {})

    def warm_up(self, num_tokens: int) -> None:
        """A step over one sequence of up to PROBE_TOKENS tokens, in blocks of its own: harmless between any steps."""
        first = self._kv_cache.num_blocks
        blocks = np.arange(first, first + num_probe_blocks(self._kv_cache.block_size), dtype=np.int32)
        batch = Batch(
            token_ids=np.zeros(num_tokens, dtype=np.int64),
            num_query_tokens=[num_tokens],
            num_computed_tokens=[0],
            block_tables=[np.tile(blocks, (len(self._kv_cache.groups), 1))],
            sample_rows=np.empty(0, dtype=np.int64),
        )
        self._device.start(batch, [])
        self._device.finish()


def _masks(request_ids: Sequence[str], bitmask: GrammarBitmask | None) -> Mapping[int, Bitmask]:
    """The masks of the rows that sample, by index."""
    if bitmask is None or not bitmask.request_ids:
        return NO_MASKS
    words = np.frombuffer(bitmask.words, dtype=np.uint32).reshape(len(bitmask.request_ids), -1)
    of_request = dict(zip(bitmask.request_ids, words, strict=True))
    return {index: of_request[name] for index, name in enumerate(request_ids) if name in of_request}
