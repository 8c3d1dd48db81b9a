"""The decoder that most families share; a family's file overrides the part in which it differs."""

from __future__ import annotations

from dataclasses import dataclass

from evensong.kernels.interface import Attention, Builder, Norm, Ops, Value, Weight
from evensong.kernels.mode import ITEM_BYTES
from evensong.models.base import CausalLM
from evensong.protocol.kv_spec import LayerKVSpec
from evensong.sources.model_description import Activation, ModelDescription


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer: attention and MLP (Shazeer, GLU Variants Improve Transformer, 2020), each on the normed
    residual stream.

    The stream itself is float32: each layer adds to it twice, and bfloat16 would round what all layers wrote each time.
    """

    eps: float
    attention_norm: Norm
    qkv: Weight
    attention: Attention
    output: Weight
    mlp_norm: Norm
    gate_up: Weight
    activation: Activation
    down: Weight

    def __call__(self, ops: Ops, x: Value) -> Value:
        """x [num_tokens, hidden] float32, changed in place and returned."""
        x = ops.add_linear(x, self.output, self.mixed(ops, x))
        return ops.add_linear(x, self.down, self.fed(ops, x))

    def mixed(self, ops: Ops, x: Value) -> Value:
        """What attention gives, [num_tokens, num_heads * head_dim]."""
        return ops.attend(ops.linear(self.qkv, ops.norm(x, self.attention_norm, self.eps)), self.attention)

    def fed(self, ops: Ops, x: Value) -> Value:
        """What the MLP's gate lets through, [num_tokens, intermediate]."""
        return ops.gated(self.gate_up, ops.norm(x, self.mlp_norm, self.eps), self.activation)


class DecoderModel(CausalLM):
    """Embedding, layers, final norm, output head (its own, or the embedding's values).

    It has what `share` says: the layers of its stage, and of each its part. The methods that take a prefix of tensor
    names are what families override.
    """

    # The tensor that norms the MLP's input.
    mlp_norm_name = "post_attention_layernorm"

    def __init__(self, config: ModelDescription, build: Builder) -> None:
        self.config = config
        self.share = share = build.share
        hidden, tied = config.hidden_size, config.tie_word_embeddings
        table: Weight = None
        if share.embeds or (share.has_head and tied):
            table = build.table("model.embed_tokens.weight", share.vocabulary, hidden)
        self._embedding = table
        self._layers = [self.layer(index, f"model.layers.{index}", build) for index in share.layers]
        self._norm: Norm = None
        self._head: Weight = None
        if share.has_head:
            self._norm = self.norm("model.norm", build)
            self._head = build.head(table) if tied else build.linear({"lm_head": share.vocabulary}, hidden)

    def layer(self, index: int, prefix: str, build: Builder) -> DecoderLayer:
        """The layer whose tensors start with `prefix`."""
        config = self.config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return DecoderLayer(
            eps=config.rms_norm_eps,
            attention_norm=self.norm(f"{prefix}.input_layernorm", build),
            qkv=self.qkv(attention, build),
            attention=self.attention(index, attention, build),
            output=build.linear(
                {f"{attention}.o_proj": config.hidden_size}, self.share.queries, bias=config.output_bias
            ),
            mlp_norm=self.norm(f"{prefix}.{self.mlp_norm_name}", build),
            gate_up=self.gate_up(mlp, build),
            activation=config.activation,
            down=build.linear({f"{mlp}.down_proj": config.hidden_size}, self.share.intermediate, bias=config.mlp_bias),
        )

    def attention(self, index: int, prefix: str, build: Builder) -> Attention:
        """How the layer attends."""
        config = self.config
        return Attention(
            layer=index,
            num_heads=self.share.heads.num_heads,
            num_kv_heads=self.share.heads.num_kv_heads,
            head_dim=config.head_dim,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            rope=config.layer_ropes[index],
            qk_norm=self.qk_norm(prefix, build),
            eps=config.rms_norm_eps,
        )

    def qkv(self, prefix: str, build: Builder) -> Weight:
        """The product that gives queries, keys and values."""
        queries, keys = self.share.queries, self.share.keys
        parts = {f"{prefix}.q_proj": queries, f"{prefix}.k_proj": keys, f"{prefix}.v_proj": keys}
        return build.linear(parts, self.config.hidden_size, bias=self.config.qkv_bias)

    def qk_norm(self, prefix: str, build: Builder) -> Norm | None:
        """Norm weights of each query and key head, in families that have them."""
        return None

    def gate_up(self, prefix: str, build: Builder) -> Weight:
        """The product that gives the MLP's gate and what it gates."""
        inner = self.share.intermediate
        parts = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        return build.linear(parts, self.config.hidden_size, bias=self.config.mlp_bias, gated=True)

    def norm(self, prefix: str, build: Builder) -> Norm:
        """The weight of an RMS norm over the residual stream."""
        return build.norm(f"{prefix}.weight", self.config.hidden_size, self.config.norm_weight_offset)

    def kv_specs(self, dtype: str) -> list[LayerKVSpec]:
        size, windows = self.config.head_dim, self.config.layer_windows
        return [
            LayerKVSpec(layer, self.share.heads.num_kv_heads, size, dtype, ITEM_BYTES[dtype], windows[layer])
            for layer in self.share.layers
        ]

    def forward(self, ops: Ops) -> Value:
        share = self.share
        embeds = share.embeds
        x = ops.embed(self._embedding, self.config.embedding_scale) if embeds else ops.receive(self.config.hidden_size)
        for index, layer in zip(share.layers, self._layers, strict=True):
            x = layer(ops, x)
            ops.tap(f"layer {index}", x)
        if not share.has_head:
            ops.send(x)
        return x

    def logits(self, ops: Ops, hidden: Value) -> Value:
        return ops.head(hidden, self._norm, self.config.rms_norm_eps, self._head)
