"""TorchBuilder: a checkpoint's tensors as torch tensors and products, for devices without native kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from evensong.distributed.split import Share, Span
from evensong.kernels.attention import AttentionPlan, plain_tiles, prove_attention
from evensong.kernels.dispatch import OpSet, make_linear
from evensong.kernels.interface import (
    Builder,
    Extent,
    Norm,
    ReadTensor,
    Spans,
    Weight,
    bias_spans,
    linear_spans,
    span_of,
)
from evensong.kernels.linear import Linear, RowProver
from evensong.kernels.mode import NumericMode


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a numeric mode's name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class TorchTable:
    """Rows of an embedding table; `first`: which row of the whole is its first; `partial`: others have the rest."""

    values: torch.Tensor
    first: int
    partial: bool


@dataclass(frozen=True)
class TorchWeight:
    """A product; `partial`: over some of its inputs, to be added up with what others give."""

    linear: Linear
    partial: bool = False


class TorchBuilder(Builder):
    """Reads tensors in the numeric mode of the run. `read` is the loader's."""

    def __init__(self, share: Share, read: ReadTensor, ops: OpSet, mode: NumericMode, device: torch.device) -> None:
        super().__init__(share)
        self._read = read
        self._ops = ops
        self._device = device
        self._stored, self._compute = torch_dtype(mode.stored), torch_dtype(mode.compute)
        self._prover = RowProver()
        self._attention_results: list[bytes] = []

    def linear(self, parts: Mapping[str, Extent], inputs: Extent, *, bias: bool = False, gated: bool = False) -> Weight:
        weights = [self._tensor(name, spans) for name, spans in linear_spans(parts, inputs)]
        biased = bias and self.adds_bias(inputs)
        biases = [self._tensor(name, spans) for name, spans in bias_spans(parts)] if biased else []
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        made = make_linear(self._ops, self._prover, weight, torch.cat(biases) if biases else None)
        return TorchWeight(made, partial=not span_of(inputs).is_whole)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        return self._stored_tensor(name, (Span.whole(size),)).float().add(offset).to(self._device)

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        return torch.cat(
            [self.norm(f"{name}.weight", head_dim, offset).expand(heads, -1) for name, heads in parts.items()]
        )

    def table(self, name: str, rows: Extent, width: int) -> Weight:
        span = span_of(rows)
        values = self._stored_tensor(name, (span, Span.whole(width))).to(self._device)
        return TorchTable(values, span.first, partial=not span.is_whole)

    def head(self, table: Weight) -> Weight:
        return TorchWeight(make_linear(self._ops, self._prover, table.values.to(self._compute), None))

    def attention_plan(self, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionPlan:
        """How attention over such heads is computed here."""
        group = num_heads // num_kv_heads
        if not self._ops.invariant:
            return AttentionPlan(group, plain_tiles)
        plan = prove_attention(group, head_dim, self._compute)
        self._attention_results.append(plan.result)
        return plan

    def trial_results(self) -> list[str]:
        """What trial products gave, as digests: a machine whose libraries sum in another order has others."""
        return [result.hex() for result in self._prover.results + self._attention_results]

    def _stored_tensor(self, name: str, spans: Spans) -> torch.Tensor:
        values = self._read(name, spans)
        # Mapped files are read-only, which torch does not take.
        return torch.from_numpy(values if values.flags.writeable else np.array(values)).to(self._stored)

    def _tensor(self, name: str, spans: Spans) -> torch.Tensor:
        return self._stored_tensor(name, spans).to(self._compute).to(self._device)
