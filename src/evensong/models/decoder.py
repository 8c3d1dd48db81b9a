"""The decoder that most families share; a family's file overrides the part in which it differs."""

from __future__ import annotations

from collections.abc import Sequence
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
from evensong.sources.model_description import ModelDescription


@dataclass(frozen=True)
class DecoderLayer:
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


class DecoderModel(CausalLM):
    """Embedding, layers, final norm, output head (its own, or the embedding's values).

    The methods that take a prefix of tensor names are what families override.
    """

    def __init__(self, config: ModelDescription, build: Builder) -> None:
        self.config = config
        self._ops = build.ops
        self._mode = build.mode
        self._device = build.device
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = build.table("model.embed_tokens.weight", vocab, hidden)
        # Rounded as the table is: so it is trained.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(build.mode.stored))
        plan = build.attention_plan(config.num_heads, config.num_kv_heads, config.head_dim)
        scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale, plan)
        self._layers = [self.layer(f"model.layers.{i}", build) for i in range(config.num_layers)]
        self._norm = self.norm("model.norm", hidden, build)
        self._head: Linear = (
            build.head(self._embedding) if config.tie_word_embeddings else build.linear({"lm_head": vocab}, hidden)
        )
        # Made when the fitted length is known: tables for the longest sequence of some models take 100 MB and more.
        self._rotary: list[RotaryTable] = []

    def layer(self, prefix: str, build: Builder) -> DecoderLayer:
        """The layer whose tensors start with `prefix`."""
        return DecoderLayer(
            dtype=build.mode.compute,
            attention_norm=self.norm(f"{prefix}.input_layernorm", self.config.hidden_size, build),
            attention=self.attention(f"{prefix}.self_attn", build),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm", self.config.hidden_size, build),
            mlp=self.mlp(f"{prefix}.mlp", build),
        )

    def attention(self, prefix: str, build: Builder) -> AttentionBlock:
        """The attention block of a layer."""
        config, queries = self.config, self.shape.num_heads * self.shape.head_dim
        return AttentionBlock(
            ops=build.ops,
            shape=self.shape,
            qkv=self.qkv(prefix, build),
            output=build.linear({f"{prefix}.o_proj": config.hidden_size}, queries, bias=config.output_bias),
            qk_norm=self.qk_norm(prefix, build),
            eps=config.rms_norm_eps,
        )

    def qkv(self, prefix: str, build: Builder) -> Linear:
        """The product that gives queries, keys and values."""
        queries, keys = (heads * self.shape.head_dim for heads in (self.shape.num_heads, self.shape.num_kv_heads))
        parts = {f"{prefix}.q_proj": queries, f"{prefix}.k_proj": keys, f"{prefix}.v_proj": keys}
        return build.linear(parts, self.config.hidden_size, bias=self.config.qkv_bias)

    def qk_norm(self, prefix: str, build: Builder) -> torch.Tensor | None:
        """Norm weights of each query and key head [num_heads + num_kv_heads, head_dim], in families that have them."""
        return None

    def mlp(self, prefix: str, build: Builder) -> GatedMLP:
        """The gated MLP of a layer."""
        config = self.config
        return GatedMLP(
            activate=build.activation(config.activation),
            gate_up=self.gate_up(prefix, build),
            down=build.linear(
                {f"{prefix}.down_proj": config.hidden_size}, config.intermediate_size, bias=config.mlp_bias
            ),
        )

    def gate_up(self, prefix: str, build: Builder) -> Linear:
        """The product that gives the MLP's gate and what it gates."""
        size = self.config.intermediate_size
        parts = {f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size}
        return build.linear(parts, self.config.hidden_size, bias=self.config.mlp_bias)

    def norm(self, prefix: str, size: int, build: Builder) -> torch.Tensor:
        """The weight of an RMS norm."""
        return build.norm(f"{prefix}.weight", size, self.config.norm_weight_offset)

    def _rotary_tables(self, max_positions: int) -> list[RotaryTable]:
        """One entry a layer; layers with equal embeddings share a table."""
        tables = {
            rope: RotaryTable(self.config.rotary_dim, rope, max_positions, self._device)
            for rope in dict.fromkeys(self.config.layer_ropes)
        }
        return [tables[rope] for rope in self.config.layer_ropes]

    def set_max_model_len(self, max_model_len: int) -> None:
        self._rotary = self._rotary_tables(max_model_len)

    def kv_specs(self) -> list[LayerKVSpec]:
        config, dtype = self.config, self._mode.kv
        name = str(dtype).removeprefix("torch.")
        return [
            LayerKVSpec(layer, config.num_kv_heads, config.head_dim, name, dtype.itemsize, window)
            for layer, window in enumerate(config.layer_windows)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        if not self._rotary:
            self.set_max_model_len(self.config.max_position_embeddings)
        eps = self.config.rms_norm_eps
        x = self._ops.embedding(token_ids, self._embedding, torch.float32)
        if self._embedding_scale != 1:
            x.mul_(self._embedding_scale)
        cos_sin = {table: table.at(positions, self._mode.compute) for table in dict.fromkeys(self._rotary)}
        for layer, table, cache, places in zip(self._layers, self._rotary, kv_caches, metadata, strict=True):
            x = layer(x, eps, cos_sin[table], cache, places)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps, self._mode.compute)
        return self._head(normed).float()
