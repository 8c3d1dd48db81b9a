"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama's layers, their projections stored in one piece."""

from __future__ import annotations

from evensong.distributed.split import Span
from evensong.kernels.interface import Builder, Weight
from evensong.models.decoder import DecoderModel


class Phi3ForCausalLM(DecoderModel):
    """The shared decoder with fused tensors: queries, keys, values; gate, up."""

    def qkv(self, prefix: str, build: Builder) -> Weight:
        fused = Span.joined(self.share.queries, self.share.keys, self.share.keys)
        return build.linear({f"{prefix}.qkv_proj": fused}, self.config.hidden_size)

    def gate_up(self, prefix: str, build: Builder) -> Weight:
        fused = Span.joined(self.share.intermediate, self.share.intermediate)
        return build.linear({f"{prefix}.gate_up_proj": fused}, self.config.hidden_size, gated=True)
