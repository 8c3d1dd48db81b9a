"""What a model's forward pass is written in: `Ops` of one step, and the `Builder` that gives it its weights.

A model says what is computed; a backend says how. Values, weights and norms are the backend's own: tensors that are
computed at once (layers/torch_step.py), or numbers of buffers in a program that is recorded (kernels/cpu/recorder.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from evensong.sources.model_description import Activation, Rope

Value = Any
Weight = Any
Norm = Any

Float32 = np.ndarray[Any, np.dtype[np.float32]]
# (name, expected shape) -> float32 array; raises ConfigError for what is missing or mis-shaped.
ReadTensor = Callable[[str, tuple[int, ...]], Float32]


@dataclass(frozen=True)
class Attention:
    """One layer's attention. `qk_norm`: the weights of a norm of each query and key head, in families that have it.

    `scale` multiplies the scores. Which positions a layer sees is its KV cache's business (LayerKVSpec.window).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    qk_norm: Norm | None = None
    eps: float = 0.0


class Ops(ABC):
    """The ops of one step. The residual stream is float32; what goes into products has the backend's compute dtype.

    Shapes are [rows, width]: the step's tokens one after the other, whatever requests they belong to. Every row's bits
    depend on that row (and its own sequence's) alone.
    """

    @abstractmethod
    def embed(self, table: Weight, scale: float) -> Value:
        """The residual stream of the step's tokens: rows of the table, times `scale`."""

    @abstractmethod
    def norm(self, x: Value, weight: Norm, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight, ready for a product."""

    @abstractmethod
    def linear(self, weight: Weight, h: Value) -> Value:
        """h W^T + b."""

    @abstractmethod
    def add_linear(self, x: Value, weight: Weight, h: Value) -> Value:
        """x += h W^T + b; returns x."""

    @abstractmethod
    def add_norm(self, x: Value, y: Value, weight: Norm, eps: float) -> Value:
        """x += norm(y); returns x."""

    @abstractmethod
    def gated(self, weight: Weight, h: Value, activation: Activation) -> Value:
        """activation(gate) * up of the two halves of h W^T + b, ready for a product."""

    @abstractmethod
    def attend(self, qkv: Value, attention: Attention) -> Value:
        """Rotates queries and keys, stores keys and values, and attends; ready for a product."""

    @abstractmethod
    def head(self, x: Value, norm: Norm, eps: float, weight: Weight) -> Value:
        """Float32 logits of the rows that are asked for."""

    def tap(self, name: str, x: Value) -> None:
        """Names a value that whoever watches may copy; nothing is done where nobody does."""
        return None


class Builder(ABC):
    """Hands out a checkpoint's tensors as the backend's weights; what a model file declares its layers with.

    Every method raises ConfigError for tensors that are missing or have another shape.
    """

    @abstractmethod
    def linear(self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, gated: bool = False) -> Weight:
        """One product for several projections of the same input: name -> output size, stacked in order.

        `gated`: the stack is a gate and what it gates, and goes to `Ops.gated`.
        """

    @abstractmethod
    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        """The weight of an RMS norm plus `offset`."""

    @abstractmethod
    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        """Norm weights of heads: name -> number of heads that share it, in order."""

    @abstractmethod
    def table(self, name: str, rows: int, width: int) -> Weight:
        """An embedding table."""

    @abstractmethod
    def head(self, table: Weight) -> Weight:
        """The output head that shares an embedding table's values."""
