"""check() finds every kind of damage that is done to it here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evensong.kvcache.check import check
from evensong.kvcache.manager import KVCacheManager

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
