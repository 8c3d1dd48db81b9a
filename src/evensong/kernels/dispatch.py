"""Torch's op sets by device, for where there are no native kernels. The torch step calls ops through `ops_for`."""

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


def cpu_multiplies_bfloat16() -> bool:
    """True where the processor has bfloat16 dot products (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def describe_kernels(device: torch.device) -> dict[str, str]:
    """What bits depend on besides the mode: library build and instruction set."""
    if device.type == "cpu":
        # Within these the libraries still choose by cache sizes and more: start-up's trials tell (kernels/linear.py).
        isa = torch.backends.cpu.get_cpu_capability()
        return {"kernel_build": f"torch {torch.__version__}", "isa": isa, "deterministic": "yes"}
    name = torch.cuda.get_device_name(device)
    # The library's products may depend on the number of rows.
    return {"kernel_build": f"torch {torch.__version__}", "isa": name, "deterministic": "no"}
