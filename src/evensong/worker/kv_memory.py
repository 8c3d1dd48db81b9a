"""KV cache memory: one tensor a layer, and the row of zeros that masked keys read."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec


def allocate_kv_caches(
    specs: Sequence[LayerKVSpec], kv_cache: KVCacheConfig, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One [num_slots + 1, 2 * num_kv_heads * head_dim] a layer; the last row is zero for ever.

    The memory is not touched here: pages are taken as tokens are written, and stale contents are never read.
    """
    num_slots = kv_cache.num_blocks * kv_cache.block_size
    caches = []
    for spec in specs:
        cache = _empty(num_slots + 1, 2 * spec.num_kv_heads * spec.head_dim, dtype, device)
        cache[num_slots].zero_()
        caches.append(cache)
    return caches


def _empty(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody has touched; on CPU in huge pages where the system has them.

    In small ones every few tokens that reach new blocks pay for a page fault in each layer.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(rows, width, dtype=dtype, device=device)
    memory = mmap.mmap(-1, rows * width * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel built without them refuses the advice, and nothing else changes.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(rows, width)
