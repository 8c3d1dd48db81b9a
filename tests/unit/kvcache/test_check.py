"""check() finds every kind of damage that is done to it here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evensong.kvcache.check import check
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import NULL_BLOCK

Damage = Callable[[KVCacheManager], object]


def sound() -> KVCacheManager:
    manager = KVCacheManager(10, 2, fingerprint="f")
    hashes: list[bytes] = []
    manager.extend_hashes(hashes, [1, 2, 3, 4, 5, 6], None)
    assert manager.start("a", [], hashes, 6)
    manager.publish("a", hashes, 4)
    assert manager.start("b", manager.lookup(hashes, 6), hashes, 6)
    return manager


def test_a_sound_cache_passes() -> None:
    assert check(sound()) == {"total": 10, "free": 6, "owned": 4, "cached": 2, "tables": 2}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda m: m.pool.ref_counts.__setitem__(0, 1), "references"),
        (lambda m: m.pool.ref_counts.__setitem__(9, 1), "references"),
        (lambda m: m.tables["a"].append(0), "twice"),
        (lambda m: m.tables["a"].append(77), "no pool"),
        (lambda m: m.tables.pop("a"), "references"),
        (lambda m: m.pool._unlink(9), "free of"),
        (lambda m: m.pool._append(0), "an owned block"),
        (lambda m: setattr(m.pool, "num_free", 5), "counted"),
        (lambda m: m.pool._prev.__setitem__(9, 7), "links"),
        (lambda m: m.pool._next.__setitem__(9, 8), "links"),
        (lambda m: m.pool.hashes.__setitem__(0, b"x"), "another hash"),
        (lambda m: m.pool.hashes.__setitem__(8, b"x"), "not in the map"),
        (lambda m: m.pool.by_hash.__setitem__(b"x", 0), "another hash"),
        (lambda m: m._writers.clear(), "writers"),
        (lambda m: m._writers.__setitem__(b"x", 1), "writers"),
        (lambda m: m._claims["b"].clear(), "writers"),
        (lambda m: m._claims.pop("b"), "claims"),
        (lambda m: m._num_published.__setitem__("a", 9), "published"),
    ],
)
def test_damage_is_found_and_named(damage: Damage, said: str) -> None:
    manager = sound()
    damage(manager)
    with pytest.raises(AssertionError, match=said):
        check(manager)


def hybrid() -> KVCacheManager:
    """Two groups; the second one's window has passed its first block."""
    manager = KVCacheManager(10, 2, fingerprint="f", windows=(None, 3), max_step_tokens=4)
    assert manager.start("a", [], [], 6)
    manager.free_passed([("a", 4)])
    assert manager.tables["a"] == [0, NULL_BLOCK, 2, 3, 4, 5]
    return manager


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda m: m.tables["a"].__setitem__(0, NULL_BLOCK), "lacks 1 blocks of group 0, 0 were passed"),
        (lambda m: m.tables["a"].__setitem__(3, NULL_BLOCK), "lacks 2 blocks of group 1, 1 were passed"),
        (lambda m: m.tables["a"].__setitem__(5, NULL_BLOCK), "a gap in group 1"),
        (lambda m: m.tables["a"].append(6), "lacks a block of one group"),
        (lambda m: m._num_passed["a"].__setitem__(3, 0), "1 blocks of group 1, 0 were passed"),
        (lambda m: m._num_passed.clear(), "'a'"),
        (lambda m: m.free_passed([("a", 6)]), "lost a block that it sees"),
        (lambda m: m.tables["a"].__delitem__(slice(2, 6)), "lacks blocks for its tokens"),
    ],
)
def test_damage_to_a_group_is_found(damage: Damage, said: str) -> None:
    manager = hybrid()
    assert check(manager, {"a": 4})["owned"] == 5
    damage(manager)
    with pytest.raises((AssertionError, KeyError), match=said):
        check(manager, {"a": 4})
