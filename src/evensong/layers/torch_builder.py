"""TorchBuilder: a checkpoint's tensors as torch tensors and products, for devices without native kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from evensong.kernels.attention import AttentionPlan, plain_tiles, prove_attention
from evensong.kernels.dispatch import OpSet, make_linear
from evensong.kernels.interface import Builder, Norm, ReadTensor, Weight
from evensong.kernels.linear import Linear, RowProver
from evensong.kernels.mode import NumericMode


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a numeric mode's name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class TorchBuilder(Builder):
    """Reads tensors in the numeric mode of the run. `read` is the loader's."""

    def __init__(self, read: ReadTensor, ops: OpSet, mode: NumericMode, device: torch.device) -> None:
        self._read = read
        self._ops = ops
        self._device = device
        self._stored, self._compute = torch_dtype(mode.stored), torch_dtype(mode.compute)
        self._prover = RowProver()
        self._attention_results: list[bytes] = []

    def linear(self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, gated: bool = False) -> Weight:
        weights = [self._tensor(f"{name}.weight", (size, in_features)) for name, size in parts.items()]
        biases = [self._tensor(f"{name}.bias", (size,)) for name, size in parts.items()] if bias else []
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(self._ops, self._prover, weight, torch.cat(biases) if biases else None)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        return self._stored_tensor(name, (size,)).float().add(offset).to(self._device)

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        return torch.cat(
            [self.norm(f"{name}.weight", head_dim, offset).expand(heads, -1) for name, heads in parts.items()]
        )

    def table(self, name: str, rows: int, width: int) -> Weight:
        return self._stored_tensor(name, (rows, width)).to(self._device)

    def head(self, table: Weight) -> Linear:
        return make_linear(self._ops, self._prover, table.to(self._compute), None)

    def attention_plan(self, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionPlan:
        """How attention over such heads is computed here."""
        group = num_heads // num_kv_heads
        if not self._ops.invariant:
            return AttentionPlan(group, plain_tiles)
        plan = prove_attention(group, head_dim, self._compute)
        self._attention_results.append(plan.result)
        return plan

    def trial_results(self) -> str:
        """A digest of what trial products gave: a machine whose libraries sum in another order has another one."""
        return hashlib.blake2b(b"".join(self._prover.results + self._attention_results), digest_size=16).hexdigest()

    def _stored_tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = self._read(name, shape)
        # Mapped files are read-only, which torch does not take.
        return torch.from_numpy(values if values.flags.writeable else np.array(values)).to(self._stored)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._stored_tensor(name, shape).to(self._compute).to(self._device)
