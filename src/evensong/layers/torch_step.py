"""TorchStep: the ops of one step, each computed at once by the device's op set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evensong.distributed.torch_collectives import Peers
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
    """What a step reads and writes: token_ids [num_tokens]; of each layer a cache [num_slots + 1, width] and places.

    Layers have the model's numbers.
    """

    token_ids: torch.Tensor
    cos_sin: dict[Rope, CosSin]
    caches: Mapping[int, torch.Tensor]
    metadata: Mapping[int, AttentionMetadata]


class TorchStep(Ops):
    """Values are tensors [num_tokens, ..]; the residual stream is float32 and changed in place.

    `peers`: the ranks that have the rest of the model, where there are any; `vocabulary`: how many rows of the output
    head each part has.
    """

    def __init__(
        self,
        ops: OpSet,
        mode: NumericMode,
        plan: AttentionPlan,
        inputs: StepInputs,
        vocabulary: Sequence[int] = (),
        peers: Peers | None = None,
    ) -> None:
        self._ops = ops
        self._mode = mode
        self._compute = torch_dtype(mode.compute)
        self._plan = plan
        self._inputs = inputs
        self._vocabulary = vocabulary
        self._peers = peers

    def embed(self, table: Weight, scale: float) -> Value:
        token_ids = self._inputs.token_ids
        if table.partial:
            # A token's row is in one part; the others give zeros, so that the sum is the row itself.
            token_ids = token_ids - table.first
            others = (token_ids < 0) | (token_ids >= len(table.values))
            x = self._ops.embedding(token_ids.masked_fill(others, 0), table.values, torch.float32)
            x = self._others().all_reduce(x.masked_fill_(others.unsqueeze(1), 0.0))
        else:
            x = self._ops.embedding(token_ids, table.values, torch.float32)
        return x if scale == 1 else x.mul_(self._mode.rounded(scale))

    def receive(self, width: int) -> Value:
        return self._others().receive(len(self._inputs.token_ids), width)

    def send(self, x: Value) -> None:
        self._others().send(x)

    def norm(self, x: Value, weight: Norm, eps: float) -> Value:
        return self._ops.rms_norm(x, weight, eps, self._compute)

    def linear(self, weight: Weight, h: Value) -> Value:
        y = weight.linear(h)
        return self._others().all_reduce(y) if weight.partial else y

    def add_linear(self, x: Value, weight: Weight, h: Value) -> Value:
        return x.add_(self.linear(weight, h))

    def add_norm(self, x: Value, y: Value, weight: Norm, eps: float) -> Value:
        return x.add_(self._ops.rms_norm(y, weight, eps, torch.float32))

    def gated(self, weight: Weight, h: Value, activation: Activation) -> Value:
        activate = {"silu": self._ops.silu_mul, "gelu_tanh": self._ops.gelu_tanh_mul}[activation]
        return activate(weight.linear(h))

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
        logits = weight.linear(self._ops.rms_norm(x, norm, eps, self._compute)).float()
        return logits if len(self._vocabulary) < 2 else self._others().join_columns(logits, self._vocabulary)

    def _others(self) -> Peers:
        assert self._peers is not None, "a part of a model needs the others"
        return self._peers
