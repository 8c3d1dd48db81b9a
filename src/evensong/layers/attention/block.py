"""Attention block: projections, rotary embedding, the cache, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evensong.kernels.attention import AttentionPlan
from evensong.kernels.dispatch import OpSet
from evensong.kernels.linear import Linear
from evensong.layers.attention.metadata import AttentionMetadata

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """Heads, in numbers, and how attention over them is computed; `scale` multiplies the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    plan: AttentionPlan


@dataclass(frozen=True)
class AttentionBlock:
    """`qkv` stacks the three projections: queries, keys, values.

    `qk_norm`, in families that norm each query and key head: the weights [num_heads + num_kv_heads, head_dim].
    """

    ops: OpSet
    shape: AttentionShape
    qkv: Linear
    output: Linear
    qk_norm: torch.Tensor | None = None
    eps: float = 0.0

    def __call__(
        self, x: torch.Tensor, cos_sin: CosSin, cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]; writes the tokens' keys and values into `cache`."""
        shape = self.shape
        num_tokens = x.shape[0]
        rotated = shape.num_heads + shape.num_kv_heads
        heads = self.qkv(x).view(num_tokens, rotated + shape.num_kv_heads, shape.head_dim)
        if self.qk_norm is not None:
            normed = self.ops.rms_norm(heads[:, :rotated], self.qk_norm, self.eps, heads.dtype)
            heads = torch.cat([normed, heads[:, rotated:]], dim=1)
        self.ops.rotary(heads[:, :rotated, : cos_sin[0].shape[-1]], *cos_sin)
        kv = heads[:, shape.num_heads :].reshape(num_tokens, -1)
        self.ops.write_kv(cache, metadata.write_slots, kv)
        query = heads[:, : shape.num_heads]
        mixed = self.ops.attention(query, cache, metadata.chunks, shape.num_kv_heads, shape.plan, shape.scale)
        return self.output(mixed.reshape(num_tokens, -1))
