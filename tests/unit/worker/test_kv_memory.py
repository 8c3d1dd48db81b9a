"""The pool: one tensor a layer, a row of zeros at its end, pages found ahead of their use."""

from __future__ import annotations

import mmap
import struct

import pytest
import torch

from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup, LayerKVSpec
from evensong.worker import kv_memory
from evensong.worker.kv_memory import PIECE_BYTES, KVMemory

SPECS = [LayerKVSpec(layer, 2, 16, "bfloat16", 2) for layer in range(3)]
CPU = torch.device("cpu")


def _present(cache: torch.Tensor) -> float:
    """The share of the tensor's pages that the kernel has found: bit 63 of their entries in the page map."""
    first, last = (address // mmap.PAGESIZE for address in (cache.data_ptr(), cache.data_ptr() + cache.nbytes - 1))
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = struct.unpack(f"<{last - first + 1}Q", pagemap.read(8 * (last - first + 1)))
    return sum(entry >> 63 for entry in entries) / len(entries)


def test_shapes_and_the_row_of_zeros() -> None:
    caches = KVMemory(SPECS, KVCacheConfig(5, 8), torch.bfloat16, CPU).caches
    assert [tuple(cache.shape) for cache in caches] == [(41, 64)] * 3
    assert all(cache.dtype == torch.bfloat16 and not cache[40].any() for cache in caches)
    assert len({cache.data_ptr() for cache in caches}) == 3


def test_layer_groups_share_tensors() -> None:
    groups = (LayerGroup(4, (0, 2)), LayerGroup(None, (1,)))
    first, second, third = KVMemory(SPECS, KVCacheConfig(5, 8, groups), torch.bfloat16, CPU).caches
    assert first.data_ptr() == second.data_ptr() != third.data_ptr()
    assert first.shape == third.shape == (41, 64)


def test_touching_finds_every_page_and_changes_no_byte() -> None:
    blocks = 5 * PIECE_BYTES // (2 * 8 * 64 * 2)  # two pieces and a half for each layer
    memory = KVMemory(SPECS, KVCacheConfig(blocks, 8), torch.bfloat16, CPU)
    for layer, cache in enumerate(memory.caches):
        cache[0], cache[-2] = layer + 1, layer + 2
    assert all(_present(cache) < 1 for cache in memory.caches)
    pieces = 0
    while memory.touch():
        pieces += 1
    if not pieces:
        pytest.skip("this kernel does not find pages ahead of their use")
    assert pieces == 3 * 3 and not memory.touch()
    assert all(_present(cache) == 1 for cache in memory.caches)
    for layer, cache in enumerate(memory.caches):
        assert (cache[0] == layer + 1).all() and (cache[-2] == layer + 2).all()
        assert not cache[1:-2].any() and not cache[-1].any()


def test_a_kernel_that_refuses_ends_the_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "_POPULATE_WRITE", 9999)
    memory = KVMemory(SPECS, KVCacheConfig(5, 8), torch.bfloat16, CPU)
    assert not memory.touch() and not memory.touch()


def test_pages_are_given_back_and_the_caches_stay() -> None:
    blocks = 5 * PIECE_BYTES // (2 * 8 * 64 * 2)
    memory = KVMemory(SPECS, KVCacheConfig(blocks, 8), torch.bfloat16, CPU)
    for cache in memory.caches:
        cache.fill_(3)
        cache[-1].zero_()
    places = [cache.data_ptr() for cache in memory.caches]
    assert all(_present(cache) == 1 for cache in memory.caches)
    memory.release()
    assert all(_present(cache) == 0 for cache in memory.caches) and not memory.touch()
    memory.restore()
    assert [cache.data_ptr() for cache in memory.caches] == places
    assert not any(cache[-1].any() for cache in memory.caches) and memory.touch()


def test_memory_that_is_no_mapping_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")  # as on a device: torch's own memory
    memory = KVMemory(SPECS, KVCacheConfig(8, 8), torch.bfloat16, CPU)
    for cache in memory.caches:
        cache.fill_(3)
    memory.release()
    assert all(cache.untyped_storage().nbytes() == 0 for cache in memory.caches)
    memory.restore()
    assert [tuple(cache.shape) for cache in memory.caches] == [(65, 64)] * 3
    for cache in memory.caches:
        assert not cache[-1].any()
        cache.fill_(1)
