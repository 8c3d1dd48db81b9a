"""Tables, hits, writers and what becomes visible when."""

from __future__ import annotations

from evensong.kvcache.check import check
from evensong.kvcache.manager import KVCacheManager


def hashes_of(manager: KVCacheManager, tokens: list[int], salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    manager.extend_hashes(hashes, tokens, salt)
    return hashes


def awaits(manager: KVCacheManager, hashes: list[bytes], num_cached: int, num_tokens: int) -> bool:
    """Whether one of the requests that run, which all have these hashes, writes the next block."""
    return manager.awaits_writer(hashes, num_cached, num_tokens, [(name, hashes) for name in manager.tables])


def test_a_block_is_found_only_after_it_was_published() -> None:
    manager = KVCacheManager(8, 2, fingerprint="f")
    hashes = hashes_of(manager, [1, 2, 3, 4, 5])
    assert manager.start("a", [], hashes, 5)
    assert manager.lookup(hashes, 5) == [] and awaits(manager, hashes, 0, 5)
    manager.publish("a", hashes, 3)
    assert manager.lookup(hashes, 5) == manager.tables["a"][:1] and awaits(manager, hashes, 2, 5)
    manager.publish("a", hashes, 5)
    assert manager.lookup(hashes, 5) == manager.tables["a"][:2] and not awaits(manager, hashes, 4, 5)
    check(manager)


def test_one_token_is_always_left_to_compute() -> None:
    manager = KVCacheManager(8, 2, fingerprint="f")
    hashes = hashes_of(manager, [1, 2, 3, 4])
    assert manager.start("a", [], hashes, 4)
    manager.publish("a", hashes, 4)
    assert len(manager.lookup(hashes, 4)) == 1
    assert len(manager.lookup(hashes, 5)) == 2
    assert manager.lookup(hashes, 1) == [] == manager.lookup([], 0)


def test_a_salt_keeps_tenants_apart() -> None:
    manager = KVCacheManager(8, 2, fingerprint="f")
    mine = hashes_of(manager, [1, 2, 3], "mine")
    assert manager.start("a", [], mine, 3)
    manager.publish("a", mine, 3)
    assert manager.lookup(hashes_of(manager, [1, 2, 3], "theirs"), 3) == []
    assert manager.lookup(hashes_of(manager, [1, 2, 3]), 3) == []
    assert manager.lookup(mine, 3)


def test_a_start_that_finds_no_room_changes_nothing() -> None:
    manager = KVCacheManager(4, 2, fingerprint="f")
    hashes = hashes_of(manager, [1, 2, 3, 4])
    assert manager.start("a", [], hashes, 4)
    manager.publish("a", hashes, 4)
    manager.free("a")
    hit = manager.lookup(hashes, 9)
    before = manager.pool.free_list()
    assert len(hit) == 2 and not manager.start("b", hit, hashes, 9)
    assert not manager.start("b", hit, hashes, 6, room_for=9)
    assert manager.pool.free_list() == before and manager.tables == {} and manager.lookup(hashes, 9) == hit
    assert manager.start("b", hit, hashes, 8)
    assert manager.tables["b"][:2] == hit
    assert manager.grow("b", 8) == [] and manager.grow("b", 9) is None
    check(manager)


def test_a_second_writer_is_still_one_when_the_first_goes() -> None:
    manager = KVCacheManager(8, 2, fingerprint="f")
    hashes = hashes_of(manager, [1, 2, 3])
    assert manager.start("a", [], hashes, 3) and manager.start("b", [], hashes, 3)
    manager.free("a")
    assert awaits(manager, hashes, 0, 3)
    check(manager)
    manager.free("b")
    assert not awaits(manager, hashes, 0, 3)
    assert check(manager)["owned"] == 0


def test_one_that_has_shown_a_block_does_not_write_it_again() -> None:
    """The first one's block is gone with its window; a second one computes it, which alone is worth waiting for."""
    manager = KVCacheManager(8, 2, fingerprint="f", windows=(2,), max_step_tokens=2)
    hashes = hashes_of(manager, [1, 2, 3, 4, 5])
    assert manager.start("a", [], hashes, 2)
    manager.publish("a", hashes, 2)
    assert manager.grow("a", 5) is not None
    manager.free_passed([("a", 5)])
    manager.pool.forget_all()
    assert manager.start("b", [], hashes, 2) and manager.lookup(hashes, 5) == []
    assert manager.awaits_writer(hashes, 0, 5, [("b", hashes)])
    assert not manager.awaits_writer(hashes, 0, 5, [("a", hashes)])


def test_without_prefix_caching_nothing_is_hashed_or_awaited() -> None:
    manager = KVCacheManager(8, 2, fingerprint="f", enable_prefix_caching=False)
    hashes = hashes_of(manager, [1, 2, 3, 4])
    assert hashes == [] and manager.start("a", [], hashes, 4)
    manager.publish("a", hashes, 4)
    assert manager.pool.by_hash == {} and not awaits(manager, hashes, 0, 4)


def test_reset_is_refused_while_blocks_are_held() -> None:
    manager = KVCacheManager(8, 2, fingerprint="f")
    hashes = hashes_of(manager, [1, 2, 3])
    assert manager.start("a", [], hashes, 3)
    manager.publish("a", hashes, 3)
    assert manager.reset_prefix_cache() is False and manager.lookup(hashes, 3)
    assert manager.usage == 2 / 8
    manager.free("a")
    assert manager.reset_prefix_cache() is True and manager.lookup(hashes, 3) == []
    assert check(manager) == {"total": 8, "free": 8, "owned": 0, "cached": 0, "tables": 0}
