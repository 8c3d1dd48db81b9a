"""Runs a model's steps by hand: any batch, any chunking, any place in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from evensong.kernels.dispatch import OpSet
from evensong.kernels.mode import NumericMode, numeric_mode
from evensong.kvcache.layout import KVLayout, group_layers
from evensong.layers.builder import Builder
from evensong.models.base import CausalLM
from evensong.models.loader import TensorReader, load_model
from evensong.models.registry import model_class
from evensong.protocol.kv_spec import NULL_BLOCK, KVCacheConfig
from evensong.sources.model_config import ModelDescription, load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import open_weights
from evensong.worker.batch import Batch
from evensong.worker.kv_memory import KVMemory
from evensong.worker.layer_views import LayerViews

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
    """A sequence's tokens, how many of them are computed, and its blocks [num_groups, num_blocks]."""

    tokens: list[int]
    blocks: np.ndarray
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def all_logits(self) -> torch.Tensor:
        """[num_tokens, vocab] float32."""
        return torch.cat(self.logits)


class Stepper:
    """A model with caches full of NaN: whatever is read before it is written, or after it was given back, shows.

    Without `head`, hidden states stand in for logits.
    """

    def __init__(
        self, model: CausalLM, *, block_size: int = 16, num_tokens: int = 4096, seed: int = 0, head: bool = True
    ) -> None:
        self.model = model
        self.head = head
        self.block_size = block_size
        specs = model.kv_specs()
        groups = group_layers(specs)
        config = KVCacheConfig(-(-num_tokens // block_size) * len(groups), block_size, groups)
        self.layout = KVLayout(block_size, tuple(group.window for group in groups), num_tokens)
        self.views = LayerViews(specs, config)
        self.free = list(np.random.default_rng(seed).permutation(config.num_blocks))
        self.caches = KVMemory(specs, config, getattr(torch, specs[0].dtype), CPU).caches
        for cache in self.caches:
            cache[:-1].fill_(torch.nan)

    def sequence(self, tokens: Sequence[int]) -> Sequence_:
        """A new sequence in scattered blocks."""
        shape = len(self.layout.windows), -(-len(tokens) // self.block_size)
        blocks = [self.free.pop() for _ in range(shape[0] * shape[1])]
        return Sequence_(list(tokens), np.array(blocks, dtype=np.int64).reshape(shape))

    def sharing(self, other: Sequence_, tokens: Sequence[int]) -> Sequence_:
        """A new sequence on the computed blocks of another, as a prefix hit gives them."""
        num_hit = min(other.computed, len(tokens) - 1) // self.block_size
        shared = self.sequence(tokens)
        self.free += shared.blocks[:, :num_hit].reshape(-1).tolist()
        shared.blocks[:, :num_hit] = other.blocks[:, :num_hit]
        shared.computed = num_hit * self.block_size
        self._forget(shared, poison=False)
        return shared

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Sequence_, int]]) -> None:
        """Computes the next tokens of each sequence, together; every token's logits are kept."""
        counts = [count for _, count in work]
        computed = [sequence.computed for sequence, _ in work]
        tokens = [t for s, count in work for t in s.tokens[s.computed : s.computed + count]]
        positions = [p for s, count in work for p in range(s.computed, s.computed + count)]
        tables = [sequence.blocks for sequence, _ in work]
        batch = Batch(np.array(tokens), np.array(positions), counts, computed, tables, np.array([]))
        metadata = self.views.metadata(batch, self.caches[0].shape[0] - 1, CPU)
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.caches, metadata)
        results = self.model.compute_logits(hidden) if self.head else hidden
        for (sequence, count), logits in zip(work, results.split(counts), strict=True):
            sequence.logits.append(logits.clone())
            sequence.computed += count
            self._forget(sequence, poison=True)

    def _forget(self, sequence: Sequence_, *, poison: bool) -> None:
        """The sequence gives back what its windows have passed; `poison` fills it with NaN."""
        for group, window in enumerate(self.layout.windows):
            passed = sequence.blocks[group, : self.layout.first_block(sequence.computed, window)]
            for block in passed[passed != NULL_BLOCK].tolist() if poison else ():
                for cache in self.caches:
                    cache[block * self.block_size : (block + 1) * self.block_size] = torch.nan
            passed[:] = NULL_BLOCK

    def run(self, tokens: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits [num_tokens, vocab] of one sequence computed alone in chunks of `chunk` tokens."""
        sequence = self.sequence(tokens)
        while sequence.computed < len(tokens):
            self.step([(sequence, min(chunk, len(tokens) - sequence.computed))])
        return sequence.all_logits()
