"""Qwen3 (Yang et al., 2025): Llama's layers; each head's query and key are normed before they are rotated."""

from __future__ import annotations

import torch

from evensong.layers.builder import Builder
from evensong.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder with QK-norm."""

    def qk_norm(self, prefix: str, build: Builder) -> torch.Tensor:
        """One weight for all queries, one for all keys: [num_heads + num_kv_heads, head_dim]."""
        shape = self.shape
        query = self.norm(f"{prefix}.q_norm", shape.head_dim, build).expand(shape.num_heads, -1)
        key = self.norm(f"{prefix}.k_norm", shape.head_dim, build).expand(shape.num_kv_heads, -1)
        return torch.cat([query, key])
