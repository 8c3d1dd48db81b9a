"""Gated MLP (Shazeer, GLU Variants Improve Transformer, 2020): down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evensong.kernels.linear import Linear


@dataclass(frozen=True)
class GatedMLP:
    """`gate_up` stacks both input projections; `activate` makes activation(gate) * up of its output."""

    activate: Callable[[torch.Tensor], torch.Tensor]
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down(self.activate(self.gate_up(x)))
