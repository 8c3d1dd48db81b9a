"""Builder: makes blocks from a checkpoint's tensors; what a model file declares its layers with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from evensong.kernels.attention import AttentionPlan, plain_tiles, prove_attention
from evensong.kernels.dispatch import OpSet, make_linear
from evensong.kernels.linear import Linear, RowProver
from evensong.kernels.mode import NumericMode
from evensong.sources.model_description import Activation

# (name, expected shape) -> float32 tensor; raises ConfigError for what is missing or mis-shaped.
ReadTensor = Callable[[str, tuple[int, ...]], torch.Tensor]


class Builder:
    """Reads tensors in the numeric mode of the run. `read` is the loader's."""

    def __init__(self, read: ReadTensor, ops: OpSet, mode: NumericMode, device: torch.device) -> None:
        self._read = read
        self.ops = ops
        self.mode = mode
        self.device = device
        self.prover = RowProver()
        self._attention_results: list[bytes] = []

    def linear(self, parts: dict[str, int], in_features: int, *, bias: bool = False) -> Linear:
        """One matrix product for several projections of the same input: name -> output size, stacked in order."""
        weights = [self.tensor(f"{name}.weight", (size, in_features)) for name, size in parts.items()]
        biases = [self.tensor(f"{name}.bias", (size,)) for name, size in parts.items()] if bias else []
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(self.ops, self.prover, weight, torch.cat(biases) if biases else None)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor rounded to the run dtype, in the compute dtype."""
        return self._read(name, shape).to(self.mode.stored).to(self.mode.compute).to(self.device)

    def norm(self, name: str, size: int, offset: float = 0.0) -> torch.Tensor:
        """The weight of an RMS norm plus `offset`, in float32, where norms are computed."""
        return self._read(name, (size,)).to(self.mode.stored).float().add(offset).to(self.device)

    def activation(self, name: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
        """activation(gate) * up for [rows, 2 * width] -> [rows, width]."""
        return {"silu": self.ops.silu_mul, "gelu_tanh": self.ops.gelu_tanh_mul}[name]

    def table(self, name: str, rows: int, width: int) -> torch.Tensor:
        """An embedding table in the stored dtype."""
        return self._read(name, (rows, width)).to(self.mode.stored).to(self.device)

    def head(self, table: torch.Tensor) -> Linear:
        """The output head that shares an embedding table's values."""
        return make_linear(self.ops, self.prover, table.to(self.mode.compute), None)

    def attention_plan(self, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionPlan:
        """How attention over such heads is computed here."""
        group = num_heads // num_kv_heads
        if not self.ops.invariant:
            return AttentionPlan(group, plain_tiles)
        plan = prove_attention(group, head_dim, self.mode.compute)
        self._attention_results.append(plan.result)
        return plan

    def trial_results(self) -> str:
        """A digest of what all trials gave on this machine."""
        return hashlib.blake2b(b"".join(self.prover.results + self._attention_results), digest_size=16).hexdigest()
