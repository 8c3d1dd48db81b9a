"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama's layers, their projections stored in one piece."""

from __future__ import annotations

from evensong.kernels.interface import Builder, Weight
from evensong.models.decoder import DecoderModel


class Phi3ForCausalLM(DecoderModel):
    """The shared decoder with fused tensors: queries, keys, values; gate, up."""

    def qkv(self, prefix: str, build: Builder) -> Weight:
        size = self.queries + 2 * self.config.num_kv_heads * self.config.head_dim
        return build.linear({f"{prefix}.qkv_proj": size}, self.config.hidden_size)

    def gate_up(self, prefix: str, build: Builder) -> Weight:
        size = 2 * self.config.intermediate_size
        return build.linear({f"{prefix}.gate_up_proj": size}, self.config.hidden_size, gated=True)
