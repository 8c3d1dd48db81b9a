"""Records a model's forward pass into a native program, or runs its ops one by one on the way: the same segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evensong.kernels.interface import Attention, Norm, Ops, Value, Weight
from evensong.kernels.mode import NumericMode
from evensong.sources.model_description import Activation

# cos and sin [max_positions, rotary_dim / 2] of a layer's rotary embedding.
CosSin = tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True)
class NativeWeight:
    """A packed weight (`evensong._native.Weight`) and its bias in the packed order, if it has one.

    `partial`: it is over some of the product's inputs, or has some of the vocabulary's rows; others have the rest.
    `first`: its first output among those of the whole, which only tables and output heads ask for.
    """

    packed: Any
    bias: Any = None
    partial: bool = False
    first: int = 0

    @property
    def outputs(self) -> int:
        """Outputs of the product, before gating."""
        return int(self.packed.rows)


@dataclass(frozen=True)
class NativeLinks:
    """Through what a program meets other ranks' (objects of `evensong._native`); None where there is nobody.

    `feed`: bytes of the feed table that all ranks share. `group`: the parts of this stage. `logits`: those of the last
    stage, for parts of the vocabulary. `incoming` and `outgoing`: channels from the stage before and to the next.
    """

    feed: Any = None
    group: Any = None
    logits: Any = None
    incoming: Any = None
    outgoing: Any = None


@dataclass
class Watchers:
    """What a user sees of the inside of a step: arrays that taps fill, and functions that are called at taps.

    A function gets the rows of the step; it runs while no other part of the step does.
    """

    taps: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Callable[[int], None]] = field(default_factory=dict)


class Recorder(Ops):
    """Values are numbers of the program's buffers.

    A buffer is used again by every layer: the ops of a model follow one another, and none reads what two layers before
    it gave. `after_each`, if any, is called after each op with the segments that it added: it may run them at once.
    """

    def __init__(
        self,
        program: Any,
        mode: NumericMode,
        caches: Mapping[int, Any],
        cos_sin: list[CosSin],
        *,
        links: NativeLinks | None = None,
        watchers: Watchers | None = None,
        after_each: Callable[[int, int], None] | None = None,
    ) -> None:
        self._program = program
        self._mode = mode
        self._caches = caches
        self._cos_sin = cos_sin
        self._links = links or NativeLinks()
        self._watchers = watchers or Watchers()
        self._after_each = after_each
        self._buffers: dict[tuple[str, int, str, bool], int] = {}
        self._widths: dict[int, int] = {}
        self._done = 0

    def embed(self, table: Weight, scale: float) -> Value:
        x = self._buffer("residual", table.packed.cols, "float32")
        if table.partial:
            # The token's row is in one part; the others give zeros, so that the sum is the row itself.
            part = self._program.exchange(self._links.group)
            self._program.embedding(table.packed, self._mode.rounded(scale), part, first_row=table.first)
            self._program.all_reduce(part, x, "store")
        else:
            self._program.embedding(table.packed, self._mode.rounded(scale), x)
        return self._end(x)

    def receive(self, width: int) -> Value:
        x = self._buffer("residual", width, "float32")
        self._program.receive(self._links.incoming, x)
        return self._end(x)

    def send(self, x: Value) -> None:
        self._program.send(x, self._links.outgoing)
        self._end(x)

    def norm(self, x: Value, weight: Norm, eps: float) -> Value:
        h = self._buffer("normed", self._widths[x], self._mode.compute)
        self._program.norm(x, weight, eps, h)
        return self._end(h)

    def linear(self, weight: Weight, h: Value) -> Value:
        y = self._buffer("product", weight.outputs, "float32")
        return self._product(weight, h, "store", y)

    def add_linear(self, x: Value, weight: Weight, h: Value) -> Value:
        return self._product(weight, h, "add", x)

    def _product(self, weight: Weight, h: Value, mode: str, out: Value) -> Value:
        if weight.partial:
            part = self._program.exchange(self._links.group)
            self._program.linear(h, weight.packed, weight.bias, "store", part)
            self._program.all_reduce(part, out, mode)
        else:
            self._program.linear(h, weight.packed, weight.bias, mode, out)
        return self._end(out)

    def add_norm(self, x: Value, y: Value, weight: Norm, eps: float) -> Value:
        self._program.add_norm(x, y, weight, eps)
        return self._end(x)

    def gated(self, weight: Weight, h: Value, activation: Activation) -> Value:
        y = self._buffer("gated", weight.outputs // 2, self._mode.compute)
        self._program.linear(h, weight.packed, weight.bias, activation, y)
        return self._end(y)

    def attend(self, qkv: Value, attention: Attention) -> Value:
        cache = self._caches[attention.layer]
        cos, sin = self._cos_sin[attention.layer]
        width = attention.num_heads * attention.head_dim
        # Products of bfloat16 pairs need both sides in it.
        paired = self._mode.compute == self._mode.kv == "bfloat16"
        dtype = "bfloat16" if paired else "float32"
        query = self._buffer("query", width, dtype)
        mixed = self._buffer("mixed", width, dtype)
        heads = attention.num_heads
        self._program.rope(qkv, cache, heads, cos, sin, attention.qk_norm, attention.eps, query)
        self._program.attention(query, cache, heads, attention.scale, 0.0, mixed)
        if dtype != self._mode.compute:
            rounded = self._buffer("mixed, rounded", width, self._mode.compute)
            self._program.convert(mixed, rounded)
            mixed = rounded
        return self._end(mixed)

    def head(self, x: Value, norm: Norm, eps: float, weight: Weight) -> Value:
        rows = self._buffer("sampled rows", self._widths[x], "float32", sampled=True)
        normed = self._buffer("sampled rows, normed", self._widths[x], self._mode.compute, sampled=True)
        self._program.copy_sampled(x, rows)
        self._program.norm(rows, norm, eps, normed, sampled_rows=True)
        if self._links.logits is None:
            logits = self._buffer("logits", weight.outputs, "float32", sampled=True)
            self._program.linear(normed, weight.packed, weight.bias, "store", logits, sampled_rows=True)
        else:
            logits = self._program.shared_logits(self._links.logits)
            self._program.linear(
                normed, weight.packed, weight.bias, "store", logits, sampled_rows=True, first_column=weight.first
            )
            self._program.gather_logits(logits)
        return self._end(logits)

    def tap(self, name: str, x: Value) -> None:
        target = self._watchers.taps.get(name)
        if target is not None:
            self._program.tap(name, x, target)
        call = self._watchers.callbacks.get(name)
        if call is not None:
            self._program.callback(name, call)
        self._end(x)

    def _buffer(self, use: str, width: int, dtype: str, *, sampled: bool = False) -> int:
        key = (use, width, dtype, sampled)
        if key not in self._buffers:
            self._buffers[key] = index = self._program.buffer(width, dtype, sampled)
            self._widths[index] = width
        return self._buffers[key]

    def _end(self, value: int) -> int:
        first, self._done = self._done, self._program.num_segments
        if self._after_each is not None:
            self._after_each(first, self._done)
        return value
