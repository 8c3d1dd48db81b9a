"""Gated MLP (Shazeer, GLU Variants Improve Transformer, 2020): down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evensong.kernels.dispatch import OpSet
from evensong.kernels.linear import Linear


@dataclass(frozen=True)
class GatedMLP:
    """`gate_up` stacks both input projections."""

    ops: OpSet
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down(self.ops.silu_mul(self.gate_up(x)))
