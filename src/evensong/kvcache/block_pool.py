"""BlockPool: who holds each KV block. Every operation is O(1) a block.

Blocks are numbered 0..num_blocks-1. A block is *owned* (reference count > 0) or *free*. Free blocks stand in one
doubly linked list in order of last use; a free block may still hold a hashed prefix, which a lookup can revive until
the block is taken for something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, the free list, and the map from block hashes to blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, int] = {}
        self.num_free = num_blocks
        # The list's sentinel is the index past the last block: next of it is the least recently used block.
        self._next = [(i + 1) % (num_blocks + 1) for i in range(num_blocks + 1)]
        self._prev = [(i - 1) % (num_blocks + 1) for i in range(num_blocks + 1)]

    @property
    def num_owned(self) -> int:
        """Blocks that at least one request holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, least recently used first; None when there are not enough."""
        if count > self.num_free:
            return None
        sentinel = self.num_blocks
        taken = []
        for _ in range(count):
            block = self._next[sentinel]
            self._unlink(block)
            self._forget(block)
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block; a free one is taken off the free list with its content."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._unlink(block)
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block. The last ones of a sequence are reused first: a prefix lives longer."""
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} released too often"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes an owned block's content findable; the first block with a hash keeps it."""
        assert self.ref_counts[block] > 0, f"block {block} published while free"
        if self.hashes[block] is None and block_hash not in self.by_hash:
            self.hashes[block] = block_hash
            self.by_hash[block_hash] = block

    def forget_all(self) -> None:
        """Drops every hash; owned blocks stay owned."""
        self.by_hash.clear()
        self.hashes = [None] * self.num_blocks

    def free_list(self) -> list[int]:
        """The free blocks in the order in which they would be taken (for the invariants; O(num_free))."""
        order: list[int] = []
        following, end = self._next, self.num_blocks
        block = following[end]
        # Links that are damaged may lead round and round.
        while block != end and len(order) <= end:
            order.append(block)
            block = following[block]
        return order

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        if block_hash is not None:
            self.hashes[block] = None
            del self.by_hash[block_hash]

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _append(self, block: int) -> None:
        sentinel = self.num_blocks
        last = self._prev[sentinel]
        self._next[last] = block
        self._prev[block] = last
        self._next[block] = sentinel
        self._prev[sentinel] = block
        self.num_free += 1
