"""Qwen3 (Yang et al., 2025): Llama's layers; each head's query and key are normed before they are rotated."""

from __future__ import annotations

from evensong.kernels.interface import Builder, Norm
from evensong.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder with QK-norm."""

    def qk_norm(self, prefix: str, build: Builder) -> Norm:
        """One weight for all queries, one for all keys."""
        config, heads = self.config, self.share.heads
        parts = {f"{prefix}.q_norm": heads.num_heads, f"{prefix}.k_norm": heads.num_kv_heads}
        return build.head_norms(parts, config.head_dim, config.norm_weight_offset)
