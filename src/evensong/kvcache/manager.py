"""KVCacheManager: block tables of requests, prefix hits, and what may be seen by whom.

A block becomes visible to other requests only through `publish`, which the scheduler calls after the step that wrote
it has run. Until then its hash stands in `_writers`, so that a request that needs it can wait instead of computing it
a second time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from evensong.kvcache.block_pool import BlockPool
from evensong.kvcache.hashing import extend_hashes, root_hash


class KVCacheManager:
    """Allocates, shares, publishes and frees the blocks of requests; the only writer of the pool."""

    def __init__(
        self, num_blocks: int, block_size: int, *, fingerprint: str, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tables: dict[str, list[int]] = {}
        self._fingerprint = fingerprint
        # How many running requests have still to write a block, by its hash; usually one.
        self._writers: dict[bytes, int] = {}
        self._claims: dict[str, deque[bytes]] = {}
        self._num_published: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, in [0, 1]."""
        return self.pool.num_owned / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Brings a request's block hashes up to its tokens; nothing to do when prefix caching is off."""
        if self.enable_prefix_caching and len(token_ids) // self.block_size > len(hashes):
            root = b"" if hashes else root_hash(self._fingerprint, cache_salt)
            extend_hashes(hashes, root, token_ids, self.block_size)

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Visible blocks of the longest cached prefix that leaves at least one of `num_tokens` to compute."""
        hit: list[int] = []
        for block_hash in hashes[: max(num_tokens - 1, 0) // self.block_size]:
            block = self.pool.by_hash.get(block_hash)
            if block is None:
                break
            hit.append(block)
        return hit

    def awaits_writer(self, hashes: Sequence[bytes], num_hit: int, num_tokens: int) -> bool:
        """True when the block after `num_hit` hits is being written by a running request right now."""
        usable = min(len(hashes), max(num_tokens - 1, 0) // self.block_size)
        return num_hit < usable and hashes[num_hit] in self._writers

    def start(
        self, request_id: str, hit: list[int], hashes: Sequence[bytes], num_tokens: int, *, room_for: int = 0
    ) -> bool:
        """Opens a table: shares the blocks of a hit and allocates the rest for `num_tokens`.

        False, with nothing changed, where the free blocks would not do for that, or for `room_for` tokens.
        """
        assert request_id not in self.tables
        num_revived = sum(1 for block in hit if self.pool.ref_counts[block] == 0)
        if self.blocks_for(max(num_tokens, room_for)) - len(hit) + num_revived > self.pool.num_free:
            return False
        # Shared first: a hit block that is free must not be taken for the new part.
        self.pool.share(hit)
        fresh = self.pool.allocate(self.blocks_for(num_tokens) - len(hit))
        assert fresh is not None
        self.tables[request_id] = hit + fresh
        self._num_published[request_id] = len(hit)
        self._claims[request_id] = deque()
        self.claim(request_id, hashes)
        return True

    def would_fit(self, hit: list[int], num_tokens: int, *, without: Sequence[str]) -> bool:
        """Whether `start` had room for `num_tokens` tokens once the requests `without` gave up their tables."""
        held = Counter(block for request_id in without for block in self.tables[request_id])
        refs = self.pool.ref_counts
        num_freed = sum(refs[block] == count for block, count in held.items())
        num_revived = sum(refs[block] == held[block] for block in hit)
        return self.blocks_for(num_tokens) - len(hit) + num_revived <= self.pool.num_free + num_freed

    def grow(self, request_id: str, num_tokens: int) -> list[int] | None:
        """New blocks so that the table covers `num_tokens`; None when there are not enough."""
        table = self.tables[request_id]
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return []
        fresh = self.pool.allocate(missing)
        if fresh is not None:
            table.extend(fresh)
        return fresh

    def claim(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Names this request as a writer of those of its full blocks that it has still to write."""
        claims = self._claims[request_id]
        for block_hash in hashes[self._num_published[request_id] + len(claims) :]:
            self._writers[block_hash] = self._writers.get(block_hash, 0) + 1
            claims.append(block_hash)

    def publish(self, request_id: str, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        """Makes the full blocks of the first `num_computed_tokens` tokens, written by steps that ran, findable."""
        if not self.enable_prefix_caching:
            return
        table = self.tables[request_id]
        claims = self._claims[request_id]
        done = min(num_computed_tokens // self.block_size, len(hashes))
        for index in range(self._num_published[request_id], done):
            self.pool.publish(table[index], hashes[index])
            if claims:
                self._drop_claim(claims.popleft())
        self._num_published[request_id] = max(done, self._num_published[request_id])

    def free(self, request_id: str) -> None:
        """Gives up a request's table; what was published stays findable until its blocks are reused."""
        self.pool.release(self.tables.pop(request_id))
        for block_hash in self._claims.pop(request_id):
            self._drop_claim(block_hash)
        del self._num_published[request_id]

    def reset_prefix_cache(self) -> bool:
        """Forgets every published block; False, with nothing changed, while requests hold blocks."""
        if self.pool.num_owned:
            return False
        self.pool.forget_all()
        return True

    def _drop_claim(self, block_hash: bytes) -> None:
        left = self._writers[block_hash] - 1
        if left:
            self._writers[block_hash] = left
        else:
            del self._writers[block_hash]
