"""KV cache memory: tensors that the layer groups share, and in each the row of zeros that masked keys read."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Iterator, Sequence

import torch

from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec

# Bytes that one call of `touch` finds: a huge page. 5 ms on a virtual machine that must ask its host, 0.1 ms elsewhere.
PIECE_BYTES = 2 * 2**20
# MADV_POPULATE_WRITE of Linux 5.14, which Python does not name: pages are found as if written, contents stay.
_POPULATE_WRITE = 23


class KVMemory:
    """`caches`: one [num_slots + 1, 2 * num_kv_heads * head_dim] a layer; the last row is zero for ever.

    The i-th layers of all layer groups have the same tensor: what a block belongs to is its group's business.

    Construction touches nothing, so that a start takes no longer with a large pool: pages are found as tokens are
    written, or ahead of that by `touch`. Stale contents are never read.
    """

    def __init__(
        self, specs: Sequence[LayerKVSpec], kv_cache: KVCacheConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots = kv_cache.num_blocks * kv_cache.block_size
        self._mappings: list[mmap.mmap] = []
        self._sizes: list[int] = []
        groups = [group.layers or tuple(range(len(specs))) for group in kv_cache.groups]
        by_layer: dict[int, torch.Tensor] = {}
        for layers in itertools.zip_longest(*groups):
            spec = next(specs[layer] for layer in layers if layer is not None)
            cache = self._empty(num_slots + 1, 2 * spec.num_kv_heads * spec.head_dim, dtype, device)
            cache[num_slots].zero_()
            by_layer.update({layer: cache for layer in layers if layer is not None})
        self.caches = [by_layer[layer] for layer in range(len(specs))]
        self._untouched = self._pieces()

    def touch(self) -> bool:
        """Finds the pages of the next piece, lowest blocks first; False when nothing is left or can be done."""
        piece = next(self._untouched, None)
        if piece is None:
            return False
        mapping, start, length = piece
        try:
            mapping.madvise(_POPULATE_WRITE, start, length)
        except OSError:  # an older kernel, or memory is short: what is written later finds its pages then
            self._untouched = iter(())
            return False
        return True

    def release(self) -> None:
        """Gives all pages back to the system. The caches stay where they are; what they held is lost."""
        self._untouched = iter(())
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)
        if not self._mappings:
            self._sizes = [cache.untyped_storage().nbytes() for cache in self.caches]
            for cache in self.caches:
                cache.untyped_storage().resize_(0)
            if self.caches and self.caches[0].is_cuda:
                torch.cuda.empty_cache()

    def restore(self) -> None:
        """After `release`: as after construction. A device that lacks the memory raises torch's error."""
        if not self._mappings:
            for cache, size in zip(self.caches, self._sizes, strict=True):
                cache.untyped_storage().resize_(size)
        for cache in self.caches:
            cache[-1].zero_()
        self._untouched = self._pieces()

    def _pieces(self) -> Iterator[tuple[mmap.mmap, int, int]]:
        longest = max((len(mapping) for mapping in self._mappings), default=0)
        for start in range(0, longest, PIECE_BYTES):
            for mapping in self._mappings:
                if start < len(mapping):
                    yield mapping, start, min(PIECE_BYTES, len(mapping) - start)

    def _empty(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that nobody has touched; on CPU in huge pages where the system has them.

        In small ones every few tokens that reach new blocks pay for a page fault in each layer.
        """
        if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(rows, width, dtype=dtype, device=device)
        memory = mmap.mmap(-1, rows * width * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel built without them refuses the advice, and nothing else changes.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._mappings.append(memory)
        return torch.frombuffer(memory, dtype=dtype).view(rows, width)
