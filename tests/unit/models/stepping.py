"""Runs a model's steps by hand: any batch, any chunking, any place in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from evensong.kernels.dispatch import OpSet
from evensong.kernels.mode import NumericMode, numeric_mode
from evensong.layers.attention.metadata import build_attention_metadata
from evensong.layers.builder import Builder
from evensong.models.base import CausalLM
from evensong.models.loader import TensorReader, load_model
from evensong.models.registry import model_class
from evensong.sources.model_config import ModelDescription, load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import open_weights

CPU = torch.device("cpu")


def load(
    model: str, dtype: str, mode: NumericMode | None = None, ops: OpSet | None = None
) -> tuple[CausalLM, ModelDescription]:
    """The model in the mode and with the ops that this machine takes for `dtype`, or in `mode` and with `ops`."""
    source = resolve_model(model, progress=False)
    description = load_model_description(source)
    if ops is not None and mode is not None:
        with torch.inference_mode():
            builder = Builder(TensorReader(open_weights(source), None), ops, mode, CPU)
            return model_class(description.family)(description, builder), description
    return load_model(description, open_weights(source), mode or numeric_mode(dtype, CPU), CPU), description


@dataclass
class Sequence_:
    """A sequence's tokens, how many of them are computed, and its blocks."""

    tokens: list[int]
    blocks: np.ndarray
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def all_logits(self) -> torch.Tensor:
        """[num_tokens, vocab] float32."""
        return torch.cat(self.logits)


class Stepper:
    """A model with caches full of NaN: whatever is read before it is written shows.

    Without `head`, hidden states stand in for logits.
    """

    def __init__(
        self, model: CausalLM, *, block_size: int = 16, num_tokens: int = 4096, seed: int = 0, head: bool = True
    ) -> None:
        self.model = model
        self.head = head
        self.block_size = block_size
        num_blocks = -(-num_tokens // block_size)
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.caches = []
        for spec in model.kv_specs():
            width = 2 * spec.num_kv_heads * spec.head_dim
            cache = torch.full((num_blocks * block_size + 1, width), torch.nan, dtype=getattr(torch, spec.dtype))
            cache[-1] = 0
            self.caches.append(cache)

    def sequence(self, tokens: Sequence[int]) -> Sequence_:
        """A new sequence in scattered blocks."""
        count = -(-len(tokens) // self.block_size)
        return Sequence_(list(tokens), np.array([self.free.pop() for _ in range(count)], dtype=np.int64))

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Sequence_, int]]) -> None:
        """Computes the next tokens of each sequence, together; every token's logits are kept."""
        counts = [count for _, count in work]
        computed = [sequence.computed for sequence, _ in work]
        tokens = [t for s, count in work for t in s.tokens[s.computed : s.computed + count]]
        positions = [p for s, count in work for p in range(s.computed, s.computed + count)]
        metadata = build_attention_metadata(
            counts, computed, [s.blocks for s, _ in work], self.block_size, self.caches[0].shape[0] - 1, CPU
        )
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.caches, metadata)
        results = self.model.compute_logits(hidden) if self.head else hidden
        for (sequence, count), logits in zip(work, results.split(counts), strict=True):
            sequence.logits.append(logits.clone())
            sequence.computed += count

    def run(self, tokens: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits [num_tokens, vocab] of one sequence computed alone in chunks of `chunk` tokens."""
        sequence = self.sequence(tokens)
        while sequence.computed < len(tokens):
            self.step([(sequence, min(chunk, len(tokens) - sequence.computed))])
        return sequence.all_logits()
