"""Layer groups with windows: what is given back, what a hit needs, and what stays findable."""

from __future__ import annotations

import pytest

from evensong.kvcache.check import check
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import NULL_BLOCK

TOKENS = list(range(100, 140))
GONE = NULL_BLOCK


def make(num_blocks: int = 40, windows: tuple[int | None, ...] = (None, 6), size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, size, fingerprint="f", windows=windows, max_step_tokens=8)


def hashes_of(kv_cache: KVCacheManager, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    kv_cache.extend_hashes(hashes, tokens, None)
    return hashes


def run(kv_cache: KVCacheManager, name: str, tokens: list[int]) -> list[int]:
    """Computes a request in steps of 8 tokens; the table that it has at its end."""
    hashes = hashes_of(kv_cache, tokens)
    hit = kv_cache.lookup(hashes, len(tokens))
    computed = kv_cache.num_tokens_in(hit)
    assert kv_cache.start(name, hit, hashes, min(computed + 8, len(tokens)))
    while True:
        computed = min(computed + 8, len(tokens))
        kv_cache.publish(name, hashes, computed)
        kv_cache.free_passed([(name, computed)])
        check(kv_cache, {name: computed})
        if computed == len(tokens):
            return list(kv_cache.tables[name])
        assert kv_cache.grow(name, min(computed + 8, len(tokens))) is not None


def test_a_table_keeps_its_places_when_blocks_are_given_back() -> None:
    kv_cache = make()
    assert kv_cache.start("a", [], [], 8) and kv_cache.tables["a"] == [0, 1, 2, 3]
    kv_cache.free_passed([("a", 8)])
    assert kv_cache.tables["a"] == [0, 1, 2, 3], "the next token sees positions 3 to 8"
    assert kv_cache.grow("a", 12) == [4, 5]
    kv_cache.free_passed([("a", 9)])
    assert kv_cache.tables["a"] == [0, GONE, 2, 3, 4, 5] and kv_cache.pool.free_list()[-1] == 1
    kv_cache.free_passed([("a", 9)])
    assert kv_cache.grow("a", 12) == [] and check(kv_cache, {"a": 9})["owned"] == 5
    kv_cache.free("a")
    assert check(kv_cache)["owned"] == 0


def test_a_request_holds_no_more_than_its_window_and_a_step() -> None:
    kv_cache = make(windows=(6,))
    table = run(kv_cache, "a", TOKENS)
    assert table[:8] == [GONE] * 8 and kv_cache.pool.num_owned == 2
    assert kv_cache.capacity is None and kv_cache.layout.most_blocks(6) == 4


def test_a_hit_needs_of_a_window_only_its_end() -> None:
    kv_cache = make()
    table = run(kv_cache, "a", TOKENS[:24])
    kv_cache.free("a")
    hashes = hashes_of(kv_cache, TOKENS)
    hit = kv_cache.lookup(hashes, 40)
    assert hit[::2] == table[::2] and hit[1::2] == [GONE] * 4 + table[9::2]
    assert kv_cache.num_tokens_in(hit) == 24
    assert len(kv_cache.lookup(hashes, 24)) == 10, "one token is left to compute"
    assert kv_cache.start("b", hit, hashes, 28)
    assert check(kv_cache, {"b": 24})["owned"] == 6 + 2 + 2


def test_the_longest_prefix_is_the_one_that_all_groups_have() -> None:
    kv_cache = make(windows=(None, 6, 6))
    run(kv_cache, "a", TOKENS[:32])
    kv_cache.free("a")
    hashes = hashes_of(kv_cache, TOKENS)
    assert len(kv_cache.lookup(hashes, 40)) == 8 * 3
    # The window before 32 tokens reaches into blocks 6 and 7. One group loses the first of them: a window that ends
    # with block 5 is the next that is whole.
    block = kv_cache.pool.by_hash[hashes[6] + b"\x00\x02"]
    kv_cache.pool._forget(block)
    assert len(kv_cache.lookup(hashes, 40)) == 6 * 3
    kv_cache.pool._forget(kv_cache.pool.by_hash[hashes[4]])
    assert len(kv_cache.lookup(hashes, 40)) == 4 * 3, "a group that keeps all ends at its first gap"
    kv_cache.pool._forget(kv_cache.pool.by_hash[hashes[3] + b"\x00\x01"])
    assert len(kv_cache.lookup(hashes, 40)) == 3 * 3


def test_groups_are_told_apart_under_one_hash() -> None:
    kv_cache = make(windows=(None, None))
    table = run(kv_cache, "a", TOKENS[:9])
    hashes = hashes_of(kv_cache, TOKENS[:9])
    assert kv_cache.lookup(hashes, 9) == table[:4] and len(set(table)) == 6
    kv_cache.pool._forget(table[3])
    assert kv_cache.lookup(hashes, 9) == table[:2]


def test_a_window_of_its_own_token_alone_needs_nothing() -> None:
    kv_cache = make(windows=(1,))
    assert kv_cache.lookup(hashes_of(kv_cache, TOKENS[:9]), 9) == [GONE, GONE]


def test_a_block_given_back_before_it_was_shown_is_passed_over() -> None:
    """Planned one step ahead: the plan that gives it back is made before the step that wrote it is over."""
    kv_cache = make()
    hashes = hashes_of(kv_cache, TOKENS[:20])
    assert kv_cache.start("a", [], hashes, 12)
    kv_cache.free_passed([("a", 9)])
    kv_cache.publish("a", hashes, 8)
    assert check(kv_cache, {"a": 9})["cached"] == 3
    assert kv_cache.lookup(hashes, 20) == [], "the window before 8 tokens reaches into the block that was not shown"
    kv_cache.publish("a", hashes, 12)
    assert kv_cache.num_tokens_in(kv_cache.lookup(hashes, 20)) == 12


def test_a_start_counts_what_windows_will_need() -> None:
    # 40 tokens: 10 blocks that stay, and at most 4 for the window.
    assert not make(13).start("a", [], [], 8, room_for=40) and make(14).start("a", [], [], 8, room_for=40)
    kv_cache = make(14)
    run(kv_cache, "a", TOKENS[:24])
    kv_cache.free("a")
    hashes = hashes_of(kv_cache, TOKENS)
    hit = kv_cache.lookup(hashes, 40)
    assert kv_cache.num_tokens_in(hit) == 24
    # The hit's blocks leave the free list, and those of its window come back: what fits alone fits on a hit.
    assert kv_cache.start("b", hit, hashes, 32, room_for=40)
    check(kv_cache, {"b": 24})


@pytest.mark.parametrize("windows", [(None, 6), (6, None, 6), (3,)])
def test_a_full_hit_after_another_of_any_length(windows: tuple[int | None, ...]) -> None:
    for length in range(1, 40):
        kv_cache = make(60, windows)
        run(kv_cache, "a", TOKENS[:length])
        again = kv_cache.lookup(hashes_of(kv_cache, TOKENS), 40)
        assert kv_cache.num_tokens_in(again) == length // 4 * 4
