"""The pool: one tensor a layer, a row of zeros at its end."""

from __future__ import annotations

import torch

from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.worker.kv_memory import allocate_kv_caches


def test_shapes_and_the_row_of_zeros() -> None:
    specs = [LayerKVSpec(layer, 2, 16, "bfloat16", 2) for layer in range(3)]
    caches = allocate_kv_caches(specs, KVCacheConfig(5, 8), torch.bfloat16, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in caches] == [(41, 64)] * 3
    assert all(cache.dtype == torch.bfloat16 and not cache[40].any() for cache in caches)
    assert len({cache.data_ptr() for cache in caches}) == 3
