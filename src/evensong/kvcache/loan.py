"""What one request may take of another's table that begins with the same tokens."""

from __future__ import annotations

from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import NULL_BLOCK


def loan(kv_cache: KVCacheManager, request_id: str, num_tokens: int) -> tuple[list[int], list[int]] | None:
    """Blocks of a request's table, of whose tokens the first `num_tokens` are computed, and common to both.

    First those that hold nothing else, to share as a hit; then those to copy, one a group, in which the lender goes on.
    None where windows have passed what the other needs.
    """
    table, num_groups = kv_cache.tables[request_id], kv_cache.num_groups
    num_full = num_tokens // kv_cache.block_size * num_groups
    shared = table[:num_full]
    copied = table[num_full : num_full + num_groups] if num_tokens % kv_cache.block_size else []
    for group, window in enumerate(kv_cache.layout.windows):
        first = kv_cache.layout.first_block(num_tokens, window) * num_groups + group
        if NULL_BLOCK in shared[first::num_groups]:
            return None
        for place in range(group, min(first, num_full), num_groups):
            shared[place] = NULL_BLOCK
    return None if NULL_BLOCK in copied else (shared, copied)
