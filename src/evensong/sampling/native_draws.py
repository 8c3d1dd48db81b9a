"""Draws by the native kernels: the same functions that sample inside a step, for rows whose logits changed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from evensong.kernels.cpu.native import extension
from evensong.protocol.output import TokenLogprobs
from evensong.sampling.row import Float32, SamplingRow
from evensong.sampling.sampler import Draws

_LOWEST = float(np.finfo(np.float32).min)


class NativeDraws(Draws):
    """Kernels of one instruction set."""

    def __init__(self, isa: str) -> None:
        self._isa = isa
        self._native = extension()

    def draw(self, logits: Float32, row: SamplingRow) -> int:
        params = row.params
        token: int = self._native.draw(
            np.ascontiguousarray(logits),
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            top_k=params.top_k,
            seed=params.seed or 0,
            position=row.position,
            isa=self._isa,
        )
        return token

    def logprobs(self, logits: Float32, token_id: int, count: int, asked: Sequence[int]) -> TokenLogprobs:
        shift, rank, ids, values = self._native.logprobs(np.ascontiguousarray(logits), token_id, count, self._isa)
        return compose(logits, token_id, shift, rank, ids, values, asked)


def compose(
    logits: Float32, token_id: int, shift: float, rank: int, best_ids: Any, best_values: Any, asked: Sequence[int]
) -> TokenLogprobs:
    """The record of a position: the token, the best ones, those asked for; a log-probability is a logit less `shift`.

    `logits` is read only at the token and at those asked for. Values are rounded to float32, and never -inf.
    """
    others = [token_id, *asked]
    own, *more = (_finite(float(logits[i]) - shift) for i in others)
    return TokenLogprobs(
        [token_id, *best_ids.tolist(), *asked], [own, *map(_finite, best_values.tolist()), *more], rank, len(asked)
    )


def _finite(value: float) -> float:
    return float(np.float32(max(value, _LOWEST))) if not math.isnan(value) else value
