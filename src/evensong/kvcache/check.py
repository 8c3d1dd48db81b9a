"""The KV cache's invariants as code: run when idle, after each step under a debug flag, and in every random test."""

from __future__ import annotations

from collections import Counter

from evensong.kvcache.manager import KVCacheManager


def check(kv_cache: KVCacheManager) -> dict[str, int]:
    """Proves that each block is free or owned and that reference counts match the tables.

    Returns the counts of total, free, owned and cached blocks and of tables; raises AssertionError naming the first
    violation.
    """
    pool = kv_cache.pool
    held = Counter(block for table in kv_cache.tables.values() for block in table)
    for request_id, table in kv_cache.tables.items():
        assert len(set(table)) == len(table), f"request {request_id} holds a block twice"
        assert all(0 <= block < pool.num_blocks for block in table), f"request {request_id} holds a block of no pool"
    for block in range(pool.num_blocks):
        assert pool.ref_counts[block] == held[block], (
            f"block {block} has {pool.ref_counts[block]} references, tables hold it {held[block]} times"
        )
    free = pool.free_list()
    for before, after in zip([pool.num_blocks, *free], [*free, pool.num_blocks], strict=True):
        assert pool._next[before] == after and pool._prev[after] == before, "the free list's links disagree"
    assert len(free) == len(set(free)) == pool.num_free, f"free list of {len(free)}, counted {pool.num_free}"
    assert all(pool.ref_counts[block] == 0 for block in free), "an owned block stands in the free list"
    owned = sum(1 for count in pool.ref_counts if count)
    assert owned + len(free) == pool.num_blocks, f"{owned} owned and {len(free)} free of {pool.num_blocks} blocks"
    for block_hash, block in pool.by_hash.items():
        assert pool.hashes[block] == block_hash, f"hash map names block {block}, which holds another hash"
    assert len(pool.by_hash) == sum(1 for h in pool.hashes if h is not None), "a block's hash is not in the map"
    assert set(kv_cache._claims) == set(kv_cache._num_published) == set(kv_cache.tables), "claims without a table"
    for request_id, table in kv_cache.tables.items():
        published, claims = kv_cache._num_published[request_id], kv_cache._claims[request_id]
        assert published <= len(table), f"request {request_id} published {published} of {len(table)} blocks"
        assert kv_cache.enable_prefix_caching or not claims, f"request {request_id} claims blocks that none can find"
    claimed = Counter(block_hash for claims in kv_cache._claims.values() for block_hash in claims)
    assert claimed == kv_cache._writers, "the writers are not those who claim blocks"
    return {
        "total": pool.num_blocks,
        "free": len(free),
        "owned": owned,
        "cached": len(pool.by_hash),
        "tables": len(kv_cache.tables),
    }
