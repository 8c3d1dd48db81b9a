"""Gemma 3, its text part (Gemma Team, 2025): QK-norm, four norms a layer, windows on most layers, two rotary bases."""

from __future__ import annotations

from dataclasses import dataclass

from evensong.kernels.interface import Builder, Norm, Ops, Value
from evensong.models.decoder import DecoderLayer
from evensong.models.qwen3 import Qwen3ForCausalLM


@dataclass(frozen=True)
class Gemma3Layer(DecoderLayer):
    """A layer that norms what attention and MLP give, in float32, before it is added to the residual stream."""

    attention_end_norm: Norm
    mlp_end_norm: Norm

    def __call__(self, ops: Ops, x: Value) -> Value:
        x = ops.add_norm(x, ops.linear(self.output, self.mixed(ops, x)), self.attention_end_norm, self.eps)
        return ops.add_norm(x, ops.linear(self.down, self.fed(ops, x)), self.mlp_end_norm, self.eps)


class Gemma3ForCausalLM(Qwen3ForCausalLM):
    """The shared decoder with Qwen3's QK-norm and two further norms a layer."""

    mlp_norm_name = "pre_feedforward_layernorm"

    def layer(self, index: int, prefix: str, build: Builder) -> DecoderLayer:
        return Gemma3Layer(
            **vars(super().layer(index, prefix, build)),
            attention_end_norm=self.norm(f"{prefix}.post_attention_layernorm", build),
            mlp_end_norm=self.norm(f"{prefix}.post_feedforward_layernorm", build),
        )
