"""The oracle: every op written for clarity, in float32, without regard to speed or row invariance."""

from __future__ import annotations

import math

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b."""
    y = x.float() @ weight.float().t()
    return y if bias is None else y + bias.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    x = x.float()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()


def rotary(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotated heads [rows, num_heads, head_dim] at positions [rows]; component i is paired with i + head_dim / 2."""
    half = heads.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.double().unsqueeze(-1) * frequency).unsqueeze(1)
    cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
    first, second = heads[..., :half].float(), heads[..., half:].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with gelu by its tanh formula."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one query over its keys, with grouped heads.

    query [num_heads, head_dim]; keys, values [num_keys, num_kv_heads, head_dim] -> [num_heads, head_dim].
    """
    group = query.shape[0] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,khd->hk", query.float(), keys) / math.sqrt(query.shape[-1])
    return torch.einsum("hk,khd->hd", torch.softmax(scores, dim=-1), values)
