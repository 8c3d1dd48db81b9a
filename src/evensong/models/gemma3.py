"""Gemma 3, its text part (Gemma Team, 2025): QK-norm, four norms a layer, windows on most layers, two rotary bases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evensong.layers.attention.block import CosSin
from evensong.layers.attention.metadata import AttentionMetadata
from evensong.layers.builder import Builder
from evensong.models.decoder import DecoderLayer
from evensong.models.qwen3 import Qwen3ForCausalLM


@dataclass(frozen=True)
class Gemma3Layer(DecoderLayer):
    """A layer that norms what attention and MLP give, in float32, before it is added to the residual stream."""

    attention_end_norm: torch.Tensor
    mlp_end_norm: torch.Tensor

    def __call__(
        self, x: torch.Tensor, eps: float, cos_sin: CosSin, cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        norm = self.attention.ops.rms_norm
        mixed = self.attention(norm(x, self.attention_norm, eps, self.dtype), cos_sin, cache, metadata)
        x.add_(norm(mixed, self.attention_end_norm, eps, x.dtype))
        fed = self.mlp(norm(x, self.mlp_norm, eps, self.dtype))
        return x.add_(norm(fed, self.mlp_end_norm, eps, x.dtype))


class Gemma3ForCausalLM(Qwen3ForCausalLM):
    """The shared decoder with Qwen3's QK-norm and two further norms a layer."""

    def layer(self, prefix: str, build: Builder) -> DecoderLayer:
        def norm(name: str) -> torch.Tensor:
            return self.norm(f"{prefix}.{name}", self.config.hidden_size, build)

        return Gemma3Layer(
            dtype=build.mode.compute,
            attention_norm=norm("input_layernorm"),
            attention=self.attention(f"{prefix}.self_attn", build),
            attention_end_norm=norm("post_attention_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            mlp=self.mlp(f"{prefix}.mlp", build),
            mlp_end_norm=norm("post_feedforward_layernorm"),
        )
