"""Runs a model's steps by hand: any batch, any chunking, any place in the cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evensong.kernels.dispatch import OpSet
from evensong.kernels.mode import NumericMode
from evensong.kvcache.layout import KVLayout, group_layers
from evensong.protocol.kv_spec import NULL_BLOCK, KVCacheConfig
from evensong.sources.model_config import ModelDescription, load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import source_digest
from evensong.worker.batch import Batch
from evensong.worker.device import ROWS_AT_ONCE, Device, DeviceSettings, ModelFiles
from evensong.worker.native_device import NativeDevice
from evensong.worker.torch_device import TorchDevice

CPU = torch.device("cpu")


def load(
    model: str,
    dtype: str,
    mode: NumericMode | None = None,
    ops: OpSet | None = None,
    *,
    isa: str | None = None,
    kv_dtype: str = "auto",
    threads: int | None = None,
    eager: bool = False,
) -> tuple[Device, ModelDescription]:
    """The model on the native device; with `ops` on the torch device, computing in `mode`."""
    source = resolve_model(model, progress=False)
    description = load_model_description(source)
    settings = DeviceSettings("cpu", dtype, kv_dtype, eager)
    device: Device = (
        NativeDevice(settings, isa=isa, threads=threads) if ops is None else TorchDevice(settings, ops=ops, mode=mode)
    )
    device.load(ModelFiles(source, description, lambda: source_digest(source)), show=False)
    return device, description


def arrays_of(device: Any) -> list[np.ndarray]:
    """The memory of the device's KV cache, a layer each."""
    memory = device._kv
    arrays: list[np.ndarray] = (getattr(memory, "_host", None) or memory).arrays
    return arrays


def poison(array: np.ndarray, start: int, end: int) -> None:
    """NaN in these rows, whatever the dtype."""
    array[start:end] = np.nan if array.dtype == np.float32 else 0x7FFF


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
    """A model with a cache full of NaN: whatever is read before it is written, or after it was given back, shows."""

    def __init__(
        self,
        model: Device,
        *,
        block_size: int = 16,
        num_tokens: int = 4096,
        seed: int = 0,
        max_model_len: int = 2048,
    ) -> None:
        self.device: Any = copy.copy(model)
        self.device._kv = None
        self.block_size = block_size
        specs = model.kv_specs()
        groups = group_layers(specs)
        self.config = KVCacheConfig(-(-num_tokens // block_size) * len(groups), block_size, groups)
        self.layout = KVLayout(block_size, tuple(group.window for group in groups), num_tokens)
        self.free = list(np.random.default_rng(seed).permutation(self.config.num_blocks))
        self.device.prepare(self.config, max_model_len, self.vocab_size(model))
        for array in arrays_of(self.device):
            poison(array, 0, len(array) - 1)

    @staticmethod
    def vocab_size(model: Any) -> int:
        """Logits of a row, those that pad the vocabulary included."""
        size: int = model._loaded.description.vocab_size
        return size

    def sequence(self, tokens: Sequence[int]) -> Sequence_:
        """A new sequence in scattered blocks."""
        shape = len(self.layout.windows), -(-len(tokens) // self.block_size)
        blocks = [self.free.pop() for _ in range(shape[0] * shape[1])]
        return Sequence_(list(tokens), np.array(blocks, dtype=np.int32).reshape(shape))

    def sharing(self, other: Sequence_, tokens: Sequence[int]) -> Sequence_:
        """A new sequence on the computed blocks of another, as a prefix hit gives them."""
        num_hit = min(other.computed, len(tokens) - 1) // self.block_size
        shared = self.sequence(tokens)
        self.free += shared.blocks[:, :num_hit].reshape(-1).tolist()
        shared.blocks[:, :num_hit] = other.blocks[:, :num_hit]
        shared.computed = num_hit * self.block_size
        self._forget(shared, poisoned=False)
        return shared

    def step(self, work: Sequence[tuple[Sequence_, int]]) -> None:
        """Computes the next tokens of each sequence, together; every token's logits are kept."""
        counts = [count for _, count in work]
        computed = [sequence.computed for sequence, _ in work]
        tokens = [t for s, count in work for t in s.tokens[s.computed : s.computed + count]]
        tables = [sequence.blocks for sequence, _ in work]
        batch = Batch(np.array(tokens, dtype=np.int64), counts, computed, tables, np.empty(0, dtype=np.int64))
        step = self.device.start(batch, [])
        step.wait()
        parts = [range(len(tokens))[first : first + ROWS_AT_ONCE] for first in range(0, len(tokens), ROWS_AT_ONCE)]
        results = torch.cat([torch.from_numpy(step.logits(part)) for part in parts])
        for (sequence, count), logits in zip(work, results.split(counts), strict=True):
            sequence.logits.append(logits.clone())
            sequence.computed += count
            self._forget(sequence, poisoned=True)

    def _forget(self, sequence: Sequence_, *, poisoned: bool) -> None:
        """The sequence gives back what its windows have passed; `poisoned` fills it with NaN."""
        for group, window in enumerate(self.layout.windows):
            passed = sequence.blocks[group, : self.layout.first_block(sequence.computed, window)]
            for block in passed[passed != NULL_BLOCK].tolist() if poisoned else ():
                for array in arrays_of(self.device):
                    poison(array, block * self.block_size, (block + 1) * self.block_size)
            passed[:] = NULL_BLOCK

    def run(self, tokens: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits [num_tokens, vocab] of one sequence computed alone in chunks of `chunk` tokens."""
        sequence = self.sequence(tokens)
        while sequence.computed < len(tokens):
            self.step([(sequence, min(chunk, len(tokens) - sequence.computed))])
        return sequence.all_logits()
