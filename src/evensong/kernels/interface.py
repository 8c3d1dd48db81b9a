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

from evensong.distributed.split import Share, Span
from evensong.sources.model_description import Activation, Rope

Value = Any
Weight = Any
Norm = Any

Float32 = np.ndarray[Any, np.dtype[np.float32]]
# Which indices of each dimension of a tensor are meant; their totals are its whole shape.
Spans = tuple[Span, ...]
# (name, what of it) -> float32 array; raises ConfigError for what is missing or has another whole shape.
ReadTensor = Callable[[str, Spans], Float32]
# What a rank has of a dimension; a number: all of it.
Extent = int | Span


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
        """The residual stream of the step's tokens: rows of the table, times `scale`; from all parts of the table."""

    @abstractmethod
    def receive(self, width: int) -> Value:
        """The residual stream [num_tokens, width] as the stage before this one left it."""

    @abstractmethod
    def send(self, x: Value) -> None:
        """Hands the residual stream to the next stage."""

    @abstractmethod
    def norm(self, x: Value, weight: Norm, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight, ready for a product."""

    @abstractmethod
    def linear(self, weight: Weight, h: Value) -> Value:
        """h W^T + b. A weight that holds some of its inputs gives a part; all parts are added up in rank order."""

    @abstractmethod
    def add_linear(self, x: Value, weight: Weight, h: Value) -> Value:
        """x += h W^T + b, added up as in `linear` first; returns x."""

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
        """Float32 logits of the rows that are asked for, those of all parts of the vocabulary."""

    def tap(self, name: str, x: Value) -> None:
        """Names a value that whoever watches may copy; nothing is done where nobody does."""
        return None


class Builder(ABC):
    """Hands out a checkpoint's tensors as the backend's weights; what a model file declares its layers with.

    `share` says what this rank holds: a model declares its tensors whole, and which spans of them it takes. Every
    method raises ConfigError for tensors that are missing or have another whole shape.
    """

    def __init__(self, share: Share) -> None:
        self.share = share

    @abstractmethod
    def linear(self, parts: Mapping[str, Extent], inputs: Extent, *, bias: bool = False, gated: bool = False) -> Weight:
        """One product for several projections of the same input: name -> outputs, stacked in order.

        `gated`: the stack is a gate and what it gates, and goes to `Ops.gated`. A product over some of its inputs gives
        a part of the sum, to which the first part alone adds the bias.
        """

    def adds_bias(self, inputs: Extent) -> bool:
        """Whether a product over these inputs is one that adds the bias here."""
        return span_of(inputs).is_whole or self.share.part == 0

    @abstractmethod
    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        """The weight of an RMS norm plus `offset`."""

    @abstractmethod
    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        """Norm weights of heads: name -> number of heads that share it, in order."""

    @abstractmethod
    def table(self, name: str, rows: Extent, width: int) -> Weight:
        """An embedding table, or some of its rows."""

    @abstractmethod
    def head(self, table: Weight) -> Weight:
        """The output head that shares an embedding table's values."""


def span_of(extent: Extent) -> Span:
    """The span that an extent means."""
    return extent if isinstance(extent, Span) else Span.whole(extent)


def linear_spans(parts: Mapping[str, Extent], inputs: Extent) -> list[tuple[str, Spans]]:
    """The weights of a product over several projections: name, and what of the tensor [outputs, inputs]."""
    return [(f"{name}.weight", (span_of(outputs), span_of(inputs))) for name, outputs in parts.items()]


def bias_spans(parts: Mapping[str, Extent]) -> list[tuple[str, Spans]]:
    """Its biases: name, and what of the tensor [outputs]."""
    return [(f"{name}.bias", (span_of(outputs),)) for name, outputs in parts.items()]
