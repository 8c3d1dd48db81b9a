"""KVCacheManager: block tables of requests, prefix hits, and what may be seen by whom.

A request has one table: block by block in order of position, with those of all layer groups side by side. A group with
a window gives back blocks that no token to come can see; NULL_BLOCK keeps their place.

A block becomes visible to other requests only through `publish`, which the scheduler calls after the step that wrote
it has run. Until then its hash stands in `_writers`, so that a request that needs it can wait instead of computing it
a second time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from evensong.kvcache.block_pool import BlockPool
from evensong.kvcache.hashing import extend_hashes, root_hash
from evensong.kvcache.layout import KVLayout
from evensong.protocol.kv_spec import NULL_BLOCK


class KVCacheManager:
    """Allocates, shares, publishes and frees the blocks of requests; the only writer of the pool.

    `capacity`: the longest request, in tokens, that the pool can hold alone; None where any fits. `max_step_tokens` is
    the most that a step computes of one request, which windows ask for.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        fingerprint: str,
        enable_prefix_caching: bool = True,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.layout = KVLayout(block_size, tuple(windows), max_step_tokens)
        self.capacity = self.layout.capacity(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.tables: dict[str, list[int]] = {}
        self._fingerprint = fingerprint
        # What tells one group's blocks from another's under a chain hash; the first group's need nothing.
        self._suffixes = [group.to_bytes(2, "big") if group else b"" for group in range(len(windows))]
        self._groups_by_window: dict[int, list[int]] = {}
        for group, window in enumerate(windows):
            if window is not None:
                self._groups_by_window.setdefault(window, []).append(group)
        # Of each request, by window: the blocks at the front of its table that its tokens have passed.
        self._num_passed: dict[str, dict[int, int]] = {}
        # How many running requests have still to write a block, by its hash; usually one.
        self._writers: dict[bytes, int] = {}
        self._claims: dict[str, deque[bytes]] = {}
        self._num_published: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, in [0, 1]."""
        return self.pool.num_owned / self.pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layout.block_size

    @property
    def num_groups(self) -> int:
        """Layer groups, each with an entry in every row of a table."""
        return len(self._suffixes)

    def num_tokens_in(self, table: Sequence[int]) -> int:
        """Tokens for which a table, or a hit, has blocks."""
        return len(table) // self.num_groups * self.block_size

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Brings a request's block hashes up to its tokens; nothing to do when prefix caching is off."""
        if self.enable_prefix_caching and len(token_ids) // self.block_size > len(hashes):
            root = b"" if hashes else root_hash(self._fingerprint, cache_salt)
            extend_hashes(hashes, root, token_ids, self.block_size)

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """The table of the longest cached prefix that leaves at least one of `num_tokens` to compute.

        Groups that keep all have every block of it; groups with a window those that the next token's window reaches.
        """
        usable = hashes[: max(num_tokens - 1, 0) // self.block_size]
        by_hash = self.pool.by_hash
        if self._suffixes == [b""] and not self._groups_by_window:
            hit: list[int] = []
            for block_hash in usable:
                block = by_hash.get(block_hash)
                if block is None:
                    break
                hit.append(block)
            return hit
        length = self._longest_hit(usable)
        firsts = [self.layout.first_block(length * self.block_size, window) for window in self.layout.windows]
        return [
            by_hash[usable[index] + suffix] if index >= first else NULL_BLOCK
            for index in range(length)
            for suffix, first in zip(self._suffixes, firsts, strict=True)
        ]

    def awaits_writer(
        self,
        hashes: Sequence[bytes],
        num_cached_tokens: int,
        num_tokens: int,
        writers: Iterable[tuple[str, Sequence[bytes]]],
    ) -> bool:
        """True when one of `writers`, running requests with their hashes, has still to write the block after a hit.

        The hit is of `num_cached_tokens`. A request that showed the block before no longer writes it, wherever it went.
        """
        usable = min(len(hashes), max(num_tokens - 1, 0) // self.block_size)
        num_hit = num_cached_tokens // self.block_size
        if num_hit >= usable or hashes[num_hit] not in self._writers:
            return False
        return any(
            self._num_published[request_id] <= num_hit and others[num_hit : num_hit + 1] == [hashes[num_hit]]
            for request_id, others in writers
        )

    def start(
        self,
        request_id: str,
        hit: list[int],
        hashes: Sequence[bytes],
        num_tokens: int,
        *,
        room_for: int = 0,
        num_computed: int = 0,
    ) -> bool:
        """Opens a table: shares the blocks of a hit and allocates the rest for `num_tokens`.

        `num_computed` tokens are computed already, where those are more than the hit's: a part of the block after it
        will be copied. False, with nothing changed, where the free blocks would not do for that, or for `room_for`
        tokens.
        """
        assert request_id not in self.tables
        num_hit = len(hit) // self.num_groups
        missing = self.layout.blocks_for(num_tokens) * self.num_groups - len(hit)
        revived = self._revived(hit, {})
        rest = self.layout.blocks_for(max(num_tokens, room_for)) - num_hit
        if max(missing + sum(revived), self._room(rest, revived)) > self.pool.num_free:
            return False
        # Shared first: a hit block that is free must not be taken for the new part.
        self.pool.share(block for block in hit if block != NULL_BLOCK)
        fresh = self.pool.allocate(missing)
        assert fresh is not None
        self.tables[request_id] = hit + fresh
        self._num_passed[request_id] = {
            window: self.layout.first_block(max(num_hit * self.block_size, num_computed), window)
            for window in self._groups_by_window
        }
        self._num_published[request_id] = num_hit
        self._claims[request_id] = deque()
        self.claim(request_id, hashes)
        return True

    def would_fit(self, hit: list[int], num_tokens: int, *, without: Sequence[str]) -> bool:
        """Whether `start` had room for `num_tokens` tokens once the requests `without` gave up their tables."""
        tables = (self.tables[request_id] for request_id in without)
        held = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        num_freed = sum(self.pool.ref_counts[block] == count for block, count in held.items())
        rest = self.layout.blocks_for(num_tokens) - len(hit) // self.num_groups
        return self._room(rest, self._revived(hit, held)) <= self.pool.num_free + num_freed

    def grow(self, request_id: str, num_tokens: int) -> list[int] | None:
        """New blocks so that the table covers `num_tokens`; None when there are not enough."""
        table = self.tables[request_id]
        missing = self.layout.blocks_for(num_tokens) * self.num_groups - len(table)
        if missing <= 0:
            return []
        fresh = self.pool.allocate(missing)
        if fresh is not None:
            table.extend(fresh)
        return fresh

    def free_passed(self, num_computed_tokens: Iterable[tuple[str, int]]) -> None:
        """Gives back each request's blocks before the windows of all its tokens that are still to be computed.

        What was published stays findable until its blocks are reused. Steps run in order, so those that were planned
        before may still read the blocks. Nothing to do, and nothing read, where no group has a window.
        """
        if not self._groups_by_window:
            return
        for request_id, computed in num_computed_tokens:
            passed = self._num_passed[request_id]
            for window, groups in self._groups_by_window.items():
                first = self.layout.first_block(computed, window)
                if first > passed[window]:
                    table = self.tables[request_id]
                    places = [i * self.num_groups + group for i in range(passed[window], first) for group in groups]
                    self.pool.release([table[place] for place in places])
                    for place in places:
                        table[place] = NULL_BLOCK
                    passed[window] = first

    def claim(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Names this request as a writer of those of its full blocks that it has still to write."""
        claims = self._claims[request_id]
        for block_hash in hashes[self._num_published[request_id] + len(claims) :]:
            self._writers[block_hash] = self._writers.get(block_hash, 0) + 1
            claims.append(block_hash)

    def publish(self, request_id: str, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        """Makes the full blocks of the first `num_computed_tokens` tokens, written by steps that ran, findable.

        Blocks that a later plan gave back before are passed over.
        """
        if not self.enable_prefix_caching:
            return
        table = self.tables[request_id]
        claims = self._claims[request_id]
        done = min(num_computed_tokens // self.block_size, len(hashes))
        for index in range(self._num_published[request_id], done):
            for place, suffix in enumerate(self._suffixes, index * self.num_groups):
                if table[place] != NULL_BLOCK:
                    self.pool.publish(table[place], hashes[index] + suffix)
            if claims:
                self._drop_claim(claims.popleft())
        self._num_published[request_id] = max(done, self._num_published[request_id])

    def free(self, request_id: str) -> None:
        """Gives up a request's table; what was published stays findable until its blocks are reused."""
        table = self.tables.pop(request_id)
        if self._num_passed.pop(request_id):
            table = [block for block in table if block != NULL_BLOCK]
        self.pool.release(table)
        for block_hash in self._claims.pop(request_id):
            self._drop_claim(block_hash)
        del self._num_published[request_id]

    def reset_prefix_cache(self) -> bool:
        """Forgets every published block; False, with nothing changed, while requests hold blocks."""
        if self.pool.num_owned:
            return False
        self.pool.forget_all()
        return True

    def _longest_hit(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest prefix for which every group has what it needs."""
        by_hash, length = self.pool.by_hash, len(hashes)
        for suffix, window in zip(self._suffixes, self.layout.windows, strict=True):
            if window is None:
                length = next((i for i in range(length) if hashes[i] + suffix not in by_hash), length)
        # A block that a window misses ends the prefix before it: every longer one needs it too.
        while (missing := self._last_missing(hashes, length)) is not None:
            length = missing
        return length

    def _last_missing(self, hashes: Sequence[bytes], length: int) -> int | None:
        """The last block that some window before `length` blocks reaches and that is not cached for its groups."""
        by_hash = self.pool.by_hash
        missing: int | None = None
        for window, groups in self._groups_by_window.items():
            for index in range(length - 1, self.layout.first_block(length * self.block_size, window) - 1, -1):
                if missing is not None and index <= missing:
                    break
                if any(hashes[index] + self._suffixes[group] not in by_hash for group in groups):
                    missing = index
        return missing

    def _revived(self, hit: Sequence[int], held: Mapping[int, int]) -> list[int]:
        """By group, how many of a hit's blocks sharing would take off the free list: nobody holds them.

        `held`: by block, how many of its holders are taken as gone.
        """
        refs = self.pool.ref_counts
        return [
            sum(
                1
                for block in hit[group :: self.num_groups]
                if block != NULL_BLOCK and refs[block] == held.get(block, 0)
            )
            for group in range(self.num_groups)
        ]

    def _room(self, rest: int, revived: Sequence[int]) -> int:
        """Free blocks that a request takes, at most at once, for `rest` blocks after a hit.

        `revived`: by group, the blocks of the hit that were free; they come back when the window has passed them.
        """
        limits = [self.layout.most_blocks(window) for window in self.layout.windows]
        needs = zip(limits, (rest + num_free for num_free in revived), strict=True)
        return sum(need if limit is None else min(need, limit) for limit, need in needs)

    def _drop_claim(self, block_hash: bytes) -> None:
        left = self._writers[block_hash] - 1
        if left:
            self._writers[block_hash] = left
        else:
            del self._writers[block_hash]
