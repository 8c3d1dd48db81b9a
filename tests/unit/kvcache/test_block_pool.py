"""The pool against lists and dicts, and what its operations cost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from evensong.kvcache.block_pool import BlockPool


class Counting(list[Any]):
    """A list that counts how often it is read or written."""

    touched = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).touched += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        type(self).touched += 1
        super().__setitem__(index, value)


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    assert first == [0, 1, 2] and second == [3, 4] and pool.num_owned == 5
    pool.release(first)
    assert pool.free_list() == [5, 2, 1, 0]
    assert pool.allocate(5) is None and pool.num_free == 4, "nothing changes when there is not enough"


def test_a_free_block_is_revived_with_its_content_until_it_is_taken() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"h")
    pool.release([block])
    assert pool.by_hash == {b"h": block} and pool.num_free == 3
    pool.share([pool.by_hash[b"h"]])
    assert pool.num_free == 2 and block not in pool.free_list()
    pool.share([block])
    pool.release([block])
    assert pool.num_owned == 1, "two references, one dropped"
    pool.release([block])
    assert pool.allocate(3) is not None
    assert pool.by_hash == {} and pool.hashes == [None] * 3


def test_the_first_block_with_a_hash_keeps_it() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2) or []
    pool.publish(a, b"h")
    pool.publish(b, b"h")
    pool.publish(a, b"other")
    assert pool.by_hash == {b"h": a} and pool.hashes == [b"h", None]
    pool.forget_all()
    assert pool.by_hash == {} and pool.num_owned == 2


def test_wrong_use_is_our_own_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release([0])
    with pytest.raises(AssertionError, match="published while free"):
        pool.publish(1, b"h")


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_agree_with_lists(seed: int) -> None:
    rng = random.Random(seed)
    pool, free, refs = BlockPool(20), list(range(20)), dict.fromkeys(range(20), 0)
    held: list[list[int]] = []
    for _ in range(500):
        choice = rng.random()
        if choice < 0.4:
            count = rng.randint(0, 6)
            taken = pool.allocate(count)
            expected = free[:count] if count <= len(free) else None
            assert taken == expected
            if taken is not None and expected is not None:
                del free[:count]
                refs.update(dict.fromkeys(taken, 1))
                held.append(taken)
        elif choice < 0.6 and held:
            blocks = list(rng.choice(held))
            pool.share(blocks)
            for block in blocks:
                refs[block] += 1
            held.append(blocks)
        elif held:
            blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
            for block in reversed(blocks):
                refs[block] -= 1
                if refs[block] == 0:
                    free.append(block)
        assert pool.free_list() == free and pool.num_free == len(free)
        assert pool.ref_counts == [refs[block] for block in range(20)]


def cost(num_blocks: int) -> int:
    """List accesses of a fixed run of operations in a pool of this size."""
    pool = BlockPool(num_blocks)
    for name in ("ref_counts", "hashes", "_next", "_prev"):
        setattr(pool, name, Counting(getattr(pool, name)))
    Counting.touched = 0
    for turn in range(10):
        blocks = pool.allocate(8) or []
        for block in blocks:
            pool.publish(block, bytes([turn, block % 256]))
        pool.share(blocks[:4])
        pool.release(blocks[:4])
        pool.release(blocks)
    return Counting.touched


def test_an_operation_costs_the_same_in_a_pool_a_thousand_times_as_large() -> None:
    small, large = cost(100), cost(100_000)
    assert small == large > 0
