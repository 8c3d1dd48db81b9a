"""The Llama family: Llama, SmolLM2, Mistral without a window (Touvron et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evensong.kernels.linear import Linear
from evensong.layers.attention.block import AttentionBlock, AttentionShape, CosSin
from evensong.layers.attention.metadata import AttentionMetadata
from evensong.layers.builder import Builder
from evensong.layers.mlp import GatedMLP
from evensong.layers.rotary import RotaryTable
from evensong.models.base import CausalLM
from evensong.protocol.kv_spec import LayerKVSpec
from evensong.sources.model_config import ModelDescription


@dataclass(frozen=True)
class LlamaLayer:
    """One decoder layer: attention and MLP, computed in `dtype`, each on the normed residual stream.

    The stream itself is float32: each layer adds to it twice, and bfloat16 would round what all layers wrote each time.
    """

    dtype: torch.dtype
    attention_norm: torch.Tensor
    attention: AttentionBlock
    mlp_norm: torch.Tensor
    mlp: GatedMLP

    def __call__(
        self, x: torch.Tensor, eps: float, cos_sin: CosSin, cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [num_tokens, hidden] float32, changed in place and returned."""
        norm = self.attention.ops.rms_norm
        x.add_(self.attention(norm(x, self.attention_norm, eps, self.dtype), cos_sin, cache, metadata))
        return x.add_(self.mlp(norm(x, self.mlp_norm, eps, self.dtype)))


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, final norm, output head (its own, or the embedding's values)."""

    def __init__(self, config: ModelDescription, build: Builder) -> None:
        self._config = config
        self._ops = build.ops
        self._mode = build.mode
        self._device = build.device
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = build.table("model.embed_tokens.weight", vocab, hidden)
        plan = build.attention_plan(config.num_heads, config.num_kv_heads, config.head_dim)
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, plan)
        self._layers = [self._layer(f"model.layers.{i}", shape, build) for i in range(config.num_layers)]
        self._norm = build.norm("model.norm.weight", hidden)
        self._head: Linear = (
            build.head(self._embedding) if config.tie_word_embeddings else build.linear({"lm_head": vocab}, hidden)
        )
        self._rotary = self._rotary_table(config.max_position_embeddings)

    def _layer(self, prefix: str, shape: AttentionShape, build: Builder) -> LlamaLayer:
        config, attention, mlp = self._config, f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        gate_up = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
        return LlamaLayer(
            dtype=build.mode.compute,
            attention_norm=build.norm(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=AttentionBlock(
                ops=build.ops,
                shape=shape,
                qkv=build.linear(qkv, config.hidden_size, bias=config.attention_bias),
                output=build.linear({f"{attention}.o_proj": config.hidden_size}, queries, bias=config.attention_bias),
            ),
            mlp_norm=build.norm(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            mlp=GatedMLP(
                ops=build.ops,
                gate_up=build.linear(gate_up, config.hidden_size, bias=config.mlp_bias),
                down=build.linear(
                    {f"{mlp}.down_proj": config.hidden_size}, config.intermediate_size, bias=config.mlp_bias
                ),
            ),
        )

    def _rotary_table(self, max_positions: int) -> RotaryTable:
        return RotaryTable(self._config.head_dim, self._config.rope_theta, max_positions, self._device)

    def set_max_model_len(self, max_model_len: int) -> None:
        self._rotary = self._rotary_table(max_model_len)

    def kv_specs(self) -> list[LayerKVSpec]:
        config, dtype = self._config, self._mode.kv
        name = str(dtype).removeprefix("torch.")
        return [
            LayerKVSpec(layer, config.num_kv_heads, config.head_dim, name, dtype.itemsize)
            for layer in range(config.num_layers)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        x = self._ops.embedding(token_ids, self._embedding, torch.float32)
        cos_sin = self._rotary.at(positions, self._mode.compute)
        for layer, cache in zip(self._layers, kv_caches, strict=True):
            x = layer(x, eps, cos_sin, cache, metadata)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._ops.rms_norm(hidden, self._norm, self._config.rms_norm_eps, self._mode.compute)
        return self._head(normed).float()
