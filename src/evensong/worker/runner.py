"""Runner: turns plans into forward passes and logits into tokens. The only writer of the slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from evensong.models.base import CausalLM
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.output import PromptScores
from evensong.protocol.step import ModelOutput, SchedulerOutput
from evensong.sampling.sampler import sample_rows
from evensong.worker.batch import Batch, build_batch
from evensong.worker.layer_views import LayerViews
from evensong.worker.prompt_scores import score_prompts
from evensong.worker.slots import SlotTable


class Watched(list[torch.Tensor]):
    """The KV caches of all layers: whoever takes the next layer's comes forward."""

    def __init__(self, caches: list[torch.Tensor], tick: Callable[[], None]) -> None:
        super().__init__(caches)
        self._tick = tick

    def __iter__(self) -> Iterator[torch.Tensor]:
        for cache in super().__iter__():
            self._tick()
            yield cache


class Runner:
    """One model with its KV caches. `execute` and `sample` alternate, one of each a step."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[torch.Tensor],
        kv_cache: KVCacheConfig,
        num_token_ids: int,
        device: torch.device,
    ) -> None:
        self._model: CausalLM | None = model
        self._kv_caches = kv_caches
        self._block_size = kv_cache.block_size
        self._views = LayerViews(model.kv_specs(), kv_cache)
        self._num_token_ids = num_token_ids
        self._device = device
        self._slots = SlotTable(len(kv_cache.groups))
        self._plan: SchedulerOutput | None = None
        self._logits: torch.Tensor | None = None
        self._prompts: tuple[dict[str, PromptScores], dict[str, str]] = ({}, {})

    def set_model(self, model: CausalLM | None) -> None:
        """Between steps: another object of the same model, or none while its weights are asleep."""
        self._model = model

    def watch_progress(self, tick: Callable[[], None]) -> None:
        """`tick` is called whenever a forward pass comes to the next layer."""
        self._kv_caches = Watched(self._kv_caches, tick)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> None:
        """The forward pass of `plan`; the logits of its sampled rows are kept for `sample`."""
        self._slots.apply(plan)
        batch = build_batch(plan, self._slots)
        self._logits, self._prompts = None, ({}, {})
        if len(batch.token_ids):
            hidden = self._forward(batch, self._kv_caches)
            self._logits = self._sampled_logits(batch, hidden)
            self._prompts = score_prompts(self._require_model(), hidden, plan, self._slots, self._num_token_ids)
        for request_id, count in plan.num_scheduled_tokens.items():
            self._slots[request_id].num_computed_tokens += count
        self._plan = plan

    def sample(self) -> ModelOutput:
        """Tokens for the rows of the last plan that sample, each appended to its slot."""
        assert self._plan is not None, "sample without execute"
        plan, self._plan = self._plan, None
        request_ids = list(plan.sampling_request_ids)
        output = ModelOutput(request_ids, [], [])
        output.prompt_scores, output.errors = self._prompts
        if not request_ids:
            return output
        assert self._logits is not None
        rows = [self._slots[request_id].sampling_row() for request_id in request_ids]
        results = sample_rows(self._logits.cpu().numpy(), rows, self._num_token_ids)
        for request_id, result in zip(request_ids, results, strict=True):
            if result.error is not None or result.exhausted:
                if result.error is not None:
                    output.errors[request_id] = result.error
                else:
                    output.exhausted.append(request_id)
                output.sampled_token_ids.append([])
                output.logprobs.append(None)
                continue
            self._slots[request_id].append(result.token_id)
            output.sampled_token_ids.append([result.token_id])
            output.logprobs.append(None if result.logprobs is None else [result.logprobs])
        return output

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """A forward pass over one sequence of `num_tokens` tokens, in caches of its own: harmless at any time."""
        num_blocks = -(-num_tokens // self._block_size)
        blocks = np.arange(num_blocks, dtype=np.int64) + np.zeros((self._views.num_groups, 1), dtype=np.int64)
        num_slots = num_blocks * self._block_size
        caches = [cache.new_zeros(num_slots + 1, cache.shape[1]) for cache in self._kv_caches]
        batch = Batch(
            token_ids=np.zeros(num_tokens, dtype=np.int64),
            positions=np.arange(num_tokens, dtype=np.int64),
            num_query_tokens=[num_tokens],
            num_computed_tokens=[0],
            block_tables=[blocks],
            sample_rows=np.array([num_tokens - 1]),
        )
        self._sampled_logits(batch, self._forward(batch, caches))

    def _forward(self, batch: Batch, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the batch."""
        metadata = self._views.metadata(batch, kv_caches[0].shape[0] - 1, self._device)
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        return self._require_model().forward(token_ids, positions, kv_caches, metadata)

    def _sampled_logits(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor | None:
        """Float32 logits [num_sampled, vocab_size] of the batch's sampled rows; None when none is sampled."""
        if not len(batch.sample_rows):
            return None
        rows = torch.from_numpy(batch.sample_rows).to(self._device)
        return self._require_model().compute_logits(hidden.index_select(0, rows))

    def _require_model(self) -> CausalLM:
        assert self._model is not None, "the weights are asleep"
        return self._model
