"""Rotary position embedding with a table made once, up to the fitted length (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch


class RotaryTable:
    """cos and sin for every position, float32 [max_positions, 1, head_dim]; the first half of sin is negated."""

    def __init__(self, head_dim: int, theta: float, max_positions: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), 1.0 / theta**exponents)
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1).unsqueeze(1).to(device)
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).unsqueeze(1).to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions [num_tokens] int64: two [num_tokens, 1, head_dim]."""
        return self._cos.index_select(0, positions).to(dtype), self._sin.index_select(0, positions).to(dtype)
