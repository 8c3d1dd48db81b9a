"""The KV cache's invariants as code: run when idle, after each step under a debug flag, and in every random test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from evensong.kvcache.block_pool import BlockPool
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import NULL_BLOCK

_NOTHING: Mapping[str, int] = {}


def check(kv_cache: KVCacheManager, num_computed_tokens: Mapping[str, int] = _NOTHING) -> dict[str, int]:
    """Proves that each block is free or owned, that reference counts match the tables, and what tables lack.

    `num_computed_tokens`, by request: no block is missing that one of its next tokens sees. Returns the counts of
    total, free, owned and cached blocks and of tables; raises AssertionError naming the first violation.
    """
    pool = kv_cache.pool
    held: Counter[int] = Counter()
    for request_id, table in kv_cache.tables.items():
        blocks = [block for block in table if block != NULL_BLOCK]
        assert len(set(blocks)) == len(blocks), f"request {request_id} holds a block twice"
        assert all(0 <= block < pool.num_blocks for block in blocks), f"request {request_id} holds a block of no pool"
        _check_columns(kv_cache, request_id, num_computed_tokens.get(request_id))
        held.update(blocks)
    owned = _check_references(pool, held)
    free = _check_free_list(pool)
    assert owned + len(free) == pool.num_blocks, f"{owned} owned and {len(free)} free of {pool.num_blocks} blocks"
    _check_hashes(pool)
    assert set(kv_cache._claims) == set(kv_cache._num_published) == set(kv_cache.tables), "claims without a table"
    assert set(kv_cache._num_passed) == set(kv_cache.tables), "passed blocks without a table"
    for request_id, table in kv_cache.tables.items():
        published, claims = kv_cache._num_published[request_id], kv_cache._claims[request_id]
        rows = len(table) // kv_cache.num_groups
        assert published <= rows, f"request {request_id} published {published} of {rows} blocks"
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


# A pool may have hundreds of thousands of blocks, and whoever comes next waits for the check: what looks at all blocks
# is one call of a built-in, and the block that is to blame is looked for only where there is one.


def _check_references(pool: BlockPool, held: Counter[int]) -> int:
    """Every count of references is the number of tables that hold the block; returns how many are held."""
    owned = pool.num_blocks - pool.ref_counts.count(0)
    if owned != len(held) or any(pool.ref_counts[block] != count for block, count in held.items()):
        for block, count in enumerate(pool.ref_counts):
            assert count == held[block], f"block {block} has {count} references, tables hold it {held[block]} times"
    return owned


def _check_free_list(pool: BlockPool) -> list[int]:
    """The free list is one chain, in both directions, of blocks that nobody holds; returns it."""
    free, end = pool.free_list(), pool.num_blocks
    # It was read along the links to the next ones, so of those only the last can be wrong; and a block that came twice
    # would have two that it follows.
    last = free[-1] if free else end
    back = list(map(pool._prev.__getitem__, [*free, end]))
    assert pool._next[last] == end and back == [end, *free], "the free list's links disagree"
    assert len(free) == pool.num_free, f"free list of {len(free)}, counted {pool.num_free}"
    assert not any(map(pool.ref_counts.__getitem__, free)), "an owned block stands in the free list"
    return free


def _check_hashes(pool: BlockPool) -> None:
    """The map of hashes and the blocks' own hashes say the same."""
    if list(map(pool.hashes.__getitem__, pool.by_hash.values())) != list(pool.by_hash):
        for block_hash, block in pool.by_hash.items():
            assert pool.hashes[block] == block_hash, f"hash map names block {block}, which holds another hash"
    num_hashes = pool.num_blocks - pool.hashes.count(None)
    assert len(pool.by_hash) == num_hashes, "a block's hash is not in the map"


def _check_columns(kv_cache: KVCacheManager, request_id: str, computed: int | None) -> None:
    """One group's blocks in a table: what is missing stands at the front, as far as its window has passed."""
    table, layout = kv_cache.tables[request_id], kv_cache.layout
    assert len(table) % kv_cache.num_groups == 0, f"request {request_id} lacks a block of one group"
    for group, window in enumerate(layout.windows):
        column = table[group :: kv_cache.num_groups]
        missing = sum(1 for block in column if block == NULL_BLOCK)
        passed = 0 if window is None else kv_cache._num_passed[request_id][window]
        assert NULL_BLOCK not in column[missing:], f"request {request_id} has a gap in group {group}"
        assert missing == passed, f"request {request_id} lacks {missing} blocks of group {group}, {passed} were passed"
        if computed is not None:
            written = column[computed // kv_cache.block_size :]
            shared = [block for block in written if kv_cache.pool.ref_counts[block] > 1]
            assert not shared, f"request {request_id} will write into block {shared[:1]}, which others hold"
            assert missing <= layout.first_block(computed, window), f"request {request_id} lost a block that it sees"
            assert len(column) >= layout.blocks_for(computed), f"request {request_id} lacks blocks for its tokens"
