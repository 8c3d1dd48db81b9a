"""KV cache memory: arrays that the layer groups share, and in each the row of zeros that masked keys read."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from evensong.kernels.mode import ITEM_BYTES
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, own_layers
from evensong.worker.device import num_probe_blocks

# Bytes that one call of `touch` finds: a huge page. 5 ms on a virtual machine that must ask its host, 0.1 ms elsewhere.
PIECE_BYTES = 2 * 2**20
# MADV_POPULATE_WRITE of Linux 5.14, which Python does not name: pages are found as if written, contents stay.
_POPULATE_WRITE = 23

Array = TypeVar("Array")


class HostKV:
    """`arrays`: one [num_slots + 1, 2 * num_kv_heads * head_dim] for each of `specs`; the last row is zero for ever.

    The slots are those of the pool's blocks, and then of the blocks for probes.

    Native kernels lay out a block in their own way (`native/src/cache_layout.h`), within the memory of its rows.

    bfloat16 is kept as its bits, in uint16. The i-th layers of all layer groups have the same array: what a block
    belongs to is its group's business.

    Construction touches nothing, so that a start takes no longer with a large pool: pages are found as tokens are
    written, or ahead of that by `touch`. Stale contents are never read.
    """

    def __init__(self, specs: Sequence[LayerKVSpec], kv_cache: KVCacheConfig, dtype: str) -> None:
        self._dtype = np.dtype(np.float32 if ITEM_BYTES[dtype] == 4 else np.uint16)
        self._mappings: list[mmap.mmap] = []
        self._block_size = kv_cache.block_size
        self.arrays = self.shared(specs, kv_cache, self._empty)
        self._untouched = self._pieces()

    @staticmethod
    def shared(specs: Sequence[LayerKVSpec], kv_cache: KVCacheConfig, make: Callable[[int, int], Array]) -> list[Array]:
        """An array for each layer, from `make(rows, width)`; those that layers of several groups share come twice."""
        num_slots = (kv_cache.num_blocks + num_probe_blocks(kv_cache.block_size)) * kv_cache.block_size
        of_layer = {spec.layer: spec for spec in specs}
        by_layer: dict[int, Array] = {}
        for layers in itertools.zip_longest(*own_layers(specs, kv_cache.groups)):
            spec = next(of_layer[layer] for layer in layers if layer is not None)
            cache = make(num_slots + 1, 2 * spec.num_kv_heads * spec.head_dim)
            by_layer.update({layer: cache for layer in layers if layer is not None})
        return [by_layer[spec.layer] for spec in specs]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, from and to, in this order."""
        copy_rows(self.arrays, pairs, self._block_size)

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
        """Gives all pages back to the system. The arrays stay where they are; what they held is lost."""
        self._untouched = iter(())
        for mapping in self._mappings:
            # Private memory without a file reads as zeros again, the last rows too.
            mapping.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """After `release`: as after construction."""
        self._untouched = self._pieces()

    def _pieces(self) -> Iterator[tuple[mmap.mmap, int, int]]:
        longest = max((len(mapping) for mapping in self._mappings), default=0)
        for start in range(0, longest, PIECE_BYTES):
            for mapping in self._mappings:
                if start < len(mapping):
                    yield mapping, start, min(PIECE_BYTES, len(mapping) - start)

    def _empty(self, rows: int, width: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Zeros that nobody has touched; in huge pages where the system has them.

        In small ones every few tokens that reach new blocks pay for a page fault in each layer.
        """
        memory = mmap.mmap(-1, rows * width * self._dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel built without them refuses the advice, and nothing else changes.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._mappings.append(memory)
        return np.frombuffer(memory, dtype=self._dtype).reshape(rows, width)


def copy_rows(arrays: Sequence[Any], pairs: Sequence[tuple[int, int]], block_size: int) -> None:
    """Copies blocks within each of `arrays`, from and to, in this order; arrays of several layers only once.

    Whatever a block's layout is, it lies within its rows.
    """
    for array in {id(array): array for array in arrays}.values():
        for source, target in pairs:
            begin = source * block_size
            array[target * block_size : (target + 1) * block_size] = array[begin : begin + block_size]
