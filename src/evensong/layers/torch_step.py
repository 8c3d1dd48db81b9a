"""TorchStep: the ops of one step, each computed at once by the device's op set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evensong.kernels.attention import AttentionPlan
from evensong.kernels.dispatch import OpSet
from evensong.kernels.interface import Attention, Norm, Ops, Value, Weight
from evensong.kernels.mode import NumericMode
from evensong.layers.attention.metadata import AttentionMetadata
from evensong.layers.rotary import rotary_tables
from evensong.layers.torch_builder import torch_dtype
from evensong.sources.model_description import Activation, Rope

CosSin = tuple[torch.Tensor, torch.Tensor]


class RotaryTables:
    """cos and sin by position, one pair for each rotary embedding of a model: [max_positions, 1, rotary_dim].

    The first half of sin is negated, so that x cos + swap_halves(x) sin is the rotation.
    """

    def __init__(self, rotary_dim: int, ropes: Sequence[Rope], max_positions: int, device: torch.device) -> None:
        self._tables: dict[Rope, CosSin] = {}
        for rope, table in rotary_tables(rotary_dim, ropes, max_positions).items():
            cos, sin = (torch.from_numpy(half) for half in table)
            both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
            self._tables[rope] = both[0].unsqueeze(1).to(device), both[1].unsqueeze(1).to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> dict[Rope, CosSin]:
        """cos and sin for positions [num_tokens] int64: two [num_tokens, 1, rotary_dim] for each embedding."""
        return {
            rope: (cos.index_select(0, positions).to(dtype), sin.index_select(0, positions).to(dtype))
            for rope, (cos, sin) in self._tables.items()
        }


@dataclass(frozen=True)
class StepInputs:
    """What a step reads and writes: token_ids [num_tokens]; of each layer a cache [num_slots + 1, width] and places."""

    token_ids: torch.Tensor
    cos_sin: dict[Rope, CosSin]
    caches: Sequence[torch.Tensor]
    metadata: Sequence[AttentionMetadata]


class TorchStep(Ops):
    """Values are tensors [num_tokens, ..]; the residual stream is float32 and changed in place."""

    def __init__(self, ops: OpSet, mode: NumericMode, plan: AttentionPlan, inputs: StepInputs) -> None:
        self._ops = ops
        self._mode = mode
        self._compute = torch_dtype(mode.compute)
        self._plan = plan
        self._inputs = inputs

    def embed(self, table: Weight, scale: float) -> Value:
        x = self._ops.embedding(self._inputs.token_ids, table, torch.float32)
        return x if scale == 1 else x.mul_(self._mode.rounded(scale))

    def norm(self, x: Value, weight: Norm, eps: float) -> Value:
        return self._ops.rms_norm(x, weight, eps, self._compute)

    def linear(self, weight: Weight, h: Value) -> Value:
        return weight(h)

    def add_linear(self, x: Value, weight: Weight, h: Value) -> Value:
        return x.add_(weight(h))

    def add_norm(self, x: Value, y: Value, weight: Norm, eps: float) -> Value:
        return x.add_(self._ops.rms_norm(y, weight, eps, torch.float32))

    def gated(self, weight: Weight, h: Value, activation: Activation) -> Value:
        activate = {"silu": self._ops.silu_mul, "gelu_tanh": self._ops.gelu_tanh_mul}[activation]
        return activate(weight(h))

    def attend(self, qkv: Value, attention: Attention) -> Value:
        num_tokens = qkv.shape[0]
        rotated = attention.num_heads + attention.num_kv_heads
        heads = qkv.view(num_tokens, rotated + attention.num_kv_heads, attention.head_dim)
        if attention.qk_norm is not None:
            normed = self._ops.rms_norm(heads[:, :rotated], attention.qk_norm, attention.eps, heads.dtype)
            heads = torch.cat([normed, heads[:, rotated:]], dim=1)
        cos, sin = self._inputs.cos_sin[attention.rope]
        self._ops.rotary(heads[:, :rotated, : cos.shape[-1]], cos, sin)
        cache, metadata = self._inputs.caches[attention.layer], self._inputs.metadata[attention.layer]
        kv = heads[:, attention.num_heads :].reshape(num_tokens, -1)
        self._ops.write_kv(cache, metadata.write_slots, kv)
        query = heads[:, : attention.num_heads]
        mixed = self._ops.attention(query, cache, metadata.chunks, attention.num_kv_heads, self._plan, attention.scale)
        return mixed.reshape(num_tokens, -1)

    def head(self, x: Value, norm: Norm, eps: float, weight: Weight) -> Value:
        return weight(self._ops.rms_norm(x, norm, eps, self._compute)).float()
