"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama's layers, their projections stored in one piece."""

from __future__ import annotations

from evensong.kernels.linear import Linear
from evensong.layers.builder import Builder
from evensong.models.decoder import DecoderModel


class Phi3ForCausalLM(DecoderModel):
    """The shared decoder with fused tensors: queries, keys, values; gate, up."""

    def qkv(self, prefix: str, build: Builder) -> Linear:
        heads = self.shape.num_heads + 2 * self.shape.num_kv_heads
        return build.linear({f"{prefix}.qkv_proj": heads * self.shape.head_dim}, self.config.hidden_size)

    def gate_up(self, prefix: str, build: Builder) -> Linear:
        return build.linear({f"{prefix}.gate_up_proj": 2 * self.config.intermediate_size}, self.config.hidden_size)
