"""Rotary position embedding with a table made once, up to the fitted length (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch

from evensong.sources.model_description import Rope


class RotaryTable:
    """cos and sin for every position, float32 [max_positions, 1, rotary_dim]; the first half of sin is negated."""

    def __init__(self, rotary_dim: int, rope: Rope, max_positions: int, device: torch.device) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = 1.0 / rope.theta**exponents
        factors = rope.factors_for(max_positions)
        if factors:
            frequencies /= torch.tensor(factors, dtype=torch.float32)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos().mul_(rope.magnitude), angles.sin().mul_(rope.magnitude)
        self._cos = torch.cat([cos, cos], dim=-1).unsqueeze(1).to(device)
        self._sin = torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions [num_tokens] int64: two [num_tokens, 1, rotary_dim]."""
        return self._cos.index_select(0, positions).to(dtype), self._sin.index_select(0, positions).to(dtype)
