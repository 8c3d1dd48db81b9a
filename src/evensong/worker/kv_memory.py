"""KV cache memory: one tensor a layer, and the row of zeros that masked keys read."""

from __future__ import annotations

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
        cache = torch.empty(num_slots + 1, 2 * spec.num_kv_heads * spec.head_dim, dtype=dtype, device=device)
        cache[num_slots].zero_()
        caches.append(cache)
    return caches
