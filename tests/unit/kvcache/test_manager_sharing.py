"""Blocks with several holders: what is shared, what stays hidden, and what a hit may never be used for."""

from __future__ import annotations

from evensong.kvcache.check import check
from evensong.kvcache.manager import KVCacheManager

TOKENS = list(range(100, 120))


def make(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, fingerprint="f")


def hashes_of(kv_cache: KVCacheManager, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    kv_cache.extend_hashes(hashes, tokens, None)
    return hashes


def begin(kv_cache: KVCacheManager, name: str, tokens: list[int]) -> int:
    """Starts a request on what the cache has; the number of its cached tokens."""
    hashes = hashes_of(kv_cache, tokens)
    hit = kv_cache.lookup(hashes, len(tokens))
    assert kv_cache.start(name, hit, hashes, len(tokens))
    return len(hit) * 4


def run(kv_cache: KVCacheManager, name: str, tokens: list[int]) -> int:
    """A request that comes, is computed, and goes."""
    cached = begin(kv_cache, name, tokens)
    kv_cache.publish(name, hashes_of(kv_cache, tokens), len(tokens))
    kv_cache.free(name)
    return cached


def test_a_writer_that_goes_shows_nothing_that_no_step_wrote() -> None:
    kv_cache = make()
    begin(kv_cache, "a", TOKENS[:12])
    hashes = hashes_of(kv_cache, TOKENS[:12])
    kv_cache.publish("a", hashes, 4)
    kv_cache.free("a")
    assert len(kv_cache.lookup(hashes, 12)) == 1
    assert check(kv_cache) == {"total": 8, "free": 8, "owned": 0, "cached": 1, "tables": 0}


def test_the_last_token_of_a_full_hit_is_written_to_a_block_of_its_own() -> None:
    kv_cache = make()
    run(kv_cache, "a", TOKENS[:8])
    assert begin(kv_cache, "b", TOKENS[:8]) == begin(kv_cache, "c", TOKENS[:8]) == 4
    assert kv_cache.tables["b"][0] == kv_cache.tables["c"][0]
    assert len({kv_cache.tables["b"][1], kv_cache.tables["c"][1], *kv_cache.pool.by_hash.values()}) == 4
    check(kv_cache)


def test_a_chain_ends_at_its_first_gap() -> None:
    kv_cache = make(4)
    run(kv_cache, "a", TOKENS[:16])
    hashes = hashes_of(kv_cache, TOKENS)
    # The end of a chain is taken first, so that its beginning stays of use.
    assert kv_cache.pool.allocate(1) == [3]
    assert len(kv_cache.lookup(hashes, 20)) == 3
    kv_cache.pool.share([0])
    kv_cache.pool._forget(0)
    assert kv_cache.lookup(hashes, 20) == []


def test_the_first_holder_that_goes_takes_nothing_along() -> None:
    kv_cache = make()
    run(kv_cache, "first", TOKENS[:8])
    assert begin(kv_cache, "a", [*TOKENS[:8], 1]) == begin(kv_cache, "b", [*TOKENS[:8], 2]) == 8
    assert check(kv_cache)["owned"] == 4
    kv_cache.free("a")
    assert check(kv_cache)["owned"] == 3
    assert kv_cache.usage == 3 / 8


def test_a_revived_block_is_not_also_given_out_as_new() -> None:
    """The cached blocks stand in the free list: those of the hit must leave it before new ones are taken."""
    kv_cache = make(4)
    run(kv_cache, "a", TOKENS[:9])
    assert begin(kv_cache, "b", TOKENS[:16]) == 8
    assert sorted(kv_cache.tables["b"]) == [0, 1, 2, 3]
    check(kv_cache)


def test_revived_blocks_count_as_taken() -> None:
    """Four blocks are free, two of them are the hit: three new ones do not fit beside it."""
    kv_cache = make(5)
    run(kv_cache, "a", TOKENS[:9])
    begin(kv_cache, "b", [1])
    hashes = hashes_of(kv_cache, TOKENS)
    hit = kv_cache.lookup(hashes, 20)
    before = kv_cache.pool.free_list()
    assert not kv_cache.start("c", hit, hashes, 17)
    assert not kv_cache.start("c", hit, hashes, 9, room_for=17)
    assert kv_cache.pool.free_list() == before and "c" not in kv_cache.tables
    assert kv_cache.start("c", hit, hashes, 9, room_for=16)
    assert len(kv_cache.tables["c"]) == 3


def test_two_writers_of_one_block_show_one_of_them() -> None:
    kv_cache = make()
    hashes = hashes_of(kv_cache, TOKENS[:8])
    assert kv_cache.start("a", [], hashes, 8)
    assert kv_cache.start("b", [], hashes, 8)
    kv_cache.publish("b", hashes, 8)
    kv_cache.publish("a", hashes, 8)
    assert kv_cache.lookup(hashes, 9) == kv_cache.tables["b"]
    kv_cache.free("b")
    assert check(kv_cache)["cached"] == 2


def test_output_is_claimed_and_shown_like_a_prompt() -> None:
    kv_cache = make()
    begin(kv_cache, "a", TOKENS[:7])
    hashes = hashes_of(kv_cache, TOKENS[:7])
    kv_cache.publish("a", hashes, 7)
    kv_cache.extend_hashes(hashes, TOKENS[:8], None)
    kv_cache.claim("a", hashes)
    assert kv_cache.awaits_writer(hashes, 4, 9, [("a", hashes)])
    assert kv_cache.grow("a", 8) == []
    kv_cache.publish("a", hashes, 8)
    assert kv_cache.lookup(hashes, 9) == kv_cache.tables["a"]
    assert not kv_cache.awaits_writer(hashes, 8, 9, [("a", hashes)])
