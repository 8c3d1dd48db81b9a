"""Chained hashes: equal exactly when all tokens from the start on are equal."""

from __future__ import annotations

import pytest

from evensong.kvcache.hashing import block_hash, extend_hashes, root_hash
from evensong.kvcache.manager import KVCacheManager


def chain(tokens: list[int], fingerprint: str = "f", salt: str | None = None, size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(fingerprint, salt), tokens, size)
    return hashes


def test_only_full_blocks_have_hashes() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_names_everything_before_it() -> None:
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([0, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]
    assert a == chain([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert block_hash(a[0], [5, 6, 7, 8]) == a[1]


def test_growing_step_by_step_gives_the_same_chain() -> None:
    tokens = list(range(23))
    grown: list[bytes] = []
    for length in range(len(tokens) + 1):
        extend_hashes(grown, root_hash("f", None), tokens[:length], 4)
    assert grown == chain(tokens)


def test_other_models_and_other_salts_have_other_chains() -> None:
    tokens = [1, 2, 3, 4]
    different = [chain(tokens, *key)[0] for key in (("f", None), ("g", None), ("f", ""), ("f", "a"), ("f", "\ud800"))]
    assert len(set(different)) == len(different)


def test_a_token_id_that_no_vocabulary_has_raises_and_changes_nothing() -> None:
    manager = KVCacheManager(4, 2, fingerprint="f")
    hashes: list[bytes] = []
    with pytest.raises(OverflowError):
        manager.extend_hashes(hashes, [2**40, 1], None)
    assert hashes == []
