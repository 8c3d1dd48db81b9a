"""The op set: one table of implementations by device. Layers call ops through `ops_for`, never a library directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evensong.kernels import torch_ops
from evensong.kernels.attention import AttentionChunk, AttentionPlan, attention
from evensong.kernels.linear import AnyRows, Linear, MakeLinear, PackedLinear, PlainLinear, RowProver

Attention = Callable[[torch.Tensor, torch.Tensor, Sequence[AttentionChunk], int, AttentionPlan, float], torch.Tensor]


@dataclass(frozen=True)
class OpSet:
    """One implementation of each op. `invariant`: a row's bits do not depend on the rows computed with it."""

    linear: MakeLinear
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    embedding: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    attention: Attention
    invariant: bool


def _plain_torch(linear: MakeLinear, *, invariant: bool) -> OpSet:
    return OpSet(
        linear=linear,
        rms_norm=torch_ops.rms_norm,
        rotary=torch_ops.rotary,
        silu_mul=torch_ops.silu_mul,
        gelu_tanh_mul=torch_ops.gelu_tanh_mul,
        embedding=torch_ops.embedding,
        write_kv=torch_ops.write_kv,
        attention=attention,
        invariant=invariant,
    )


OPS: dict[str, OpSet] = {
    "cpu": _plain_torch(PackedLinear, invariant=True),
    "cpu-plain": _plain_torch(PlainLinear, invariant=True),
    "cuda": _plain_torch(PlainLinear, invariant=False),
}


def ops_for(device: torch.device) -> OpSet:
    """The op set of a device."""
    if device.type == "cpu" and not torch._C._has_mkldnn:
        return OPS["cpu-plain"]
    return OPS[device.type]


def make_linear(ops: OpSet, prover: RowProver, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A matrix product with `weight` [out, in], its row counts proven on the spot."""
    return ops.linear(weight, bias, prover.plan(ops.linear, weight) if ops.invariant else AnyRows())
