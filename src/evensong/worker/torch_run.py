"""TorchRun: a step whose forward pass has run, and whose rows are sampled by Python on the output rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from evensong.distributed.grid import Rank
from evensong.distributed.token_table import TokenTable
from evensong.layers.torch_step import TorchStep
from evensong.models.base import CausalLM
from evensong.protocol.output import TokenLogprobs
from evensong.sampling.host_draws import HostDraws
from evensong.sampling.row import Bitmask, Float32, SamplingRow
from evensong.sampling.sampler import Sampled, sample_row
from evensong.worker.batch import Int64
from evensong.worker.device import NO_MASKS, ROWS_AT_ONCE, DeviceStep, NotFiniteError, StepMark, with_masks


class TorchRun(DeviceStep):
    """Logits of the sampled rows are made at once, by all ranks of the last stage; others when they are wanted.

    `tokens`: where other ranks find what this one samples, where there are others.
    """

    def __init__(
        self,
        model: CausalLM,
        step: TorchStep,
        hidden: torch.Tensor,
        sample_rows: Int64,
        rows: Sequence[SamplingRow],
        num_token_ids: int,
        rank: Rank,
        mark: StepMark,
        tokens: TokenTable | None,
    ) -> None:
        self._model = model
        self._step = step
        self._hidden = hidden
        self._rows = rows
        self._num_token_ids = num_token_ids
        self._rank = rank
        self._mark = mark
        self._tokens = tokens
        self._draws = HostDraws()
        self._sampled: dict[int, Sampled] = {}
        self._sampled_logits = self.logits(sample_rows) if rows else None

    def draw(self, masks: Mapping[int, Bitmask] = NO_MASKS) -> None:
        self._rows = with_masks(self._rows, masks)

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left to wait for; other ranks are told of the tokens."""
        if self._tokens is not None and self._mark.publishes:
            drawn = {row.feed_slot: self.sampled(index).token_id for index, row in enumerate(self._rows)}
            self.publish({slot: token for slot, token in drawn.items() if slot >= 0 and token >= 0})

    def sampled(self, index: int) -> Sampled:
        if index not in self._sampled:
            assert self._sampled_logits is not None
            self._sampled[index] = sample_row(self._sampled_logits[index], self._rows[index], self._draws)
        return self._sampled[index]

    def publish(self, tokens: Mapping[int, int]) -> None:
        # A rank that is alone learns all tokens before it starts the step that reads them.
        if self._tokens is not None:
            self._tokens.publish(self._mark.step_id, tokens)

    def score(self, rows: range, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
        scores = []
        finite = True
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            for logits, token_id in zip(self.logits(part), token_ids[first:], strict=False):
                # Other ranks do not know, and run the head over all parts.
                finite = finite and bool(np.isfinite(logits.max()))
                if finite:
                    scores.append(self._draws.logprobs(logits, token_id, num_best, ()))
        if not finite:
            raise NotFiniteError
        return scores

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | Int64) -> Float32:
        if not self._rank.is_last_stage:
            return np.empty((0, self._num_token_ids), np.float32)
        picked = self._hidden.index_select(0, torch.from_numpy(np.asarray(rows, np.int64)).to(self._hidden.device))
        logits: Float32 = self._model.logits(self._step, picked).cpu().numpy()
        return logits[: len(picked) if self._rank.is_output else 0, : self._num_token_ids]
