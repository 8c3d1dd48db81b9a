"""The pool: one tensor a layer, a row of zeros at its end, pages found ahead of their use."""

from __future__ import annotations

import mmap
import struct

import numpy as np
import pytest

from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup, LayerKVSpec
from evensong.worker import kv_memory
from evensong.worker.device import PROBE_TOKENS
from evensong.worker.kv_memory import PIECE_BYTES, HostKV

SPECS = [LayerKVSpec(layer, 2, 16, "bfloat16", 2) for layer in range(3)]


def place(cache: np.ndarray) -> int:
    return int(cache.__array_interface__["data"][0])


def _present(cache: np.ndarray) -> float:
    """The share of the tensor's pages that the kernel has found: bit 63 of their entries in the page map."""
    first, last = (address // mmap.PAGESIZE for address in (place(cache), place(cache) + cache.nbytes - 1))
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = struct.unpack(f"<{last - first + 1}Q", pagemap.read(8 * (last - first + 1)))
    return sum(entry >> 63 for entry in entries) / len(entries)


def test_shapes_and_the_row_of_zeros() -> None:
    caches = HostKV(SPECS, KVCacheConfig(5, 8), "bfloat16").arrays
    assert [tuple(cache.shape) for cache in caches] == [(5 * 8 + PROBE_TOKENS + 1, 64)] * 3
    assert all(cache.dtype == np.uint16 and not cache[-1].any() for cache in caches)
    assert len({place(cache) for cache in caches}) == 3


def test_layer_groups_share_tensors() -> None:
    groups = (LayerGroup(4, (0, 2)), LayerGroup(None, (1,)))
    first, second, third = HostKV(SPECS, KVCacheConfig(5, 8, groups), "bfloat16").arrays
    assert place(first) == place(second) != place(third)
    assert first.shape == third.shape == (5 * 8 + PROBE_TOKENS + 1, 64)


def test_touching_finds_every_page_and_changes_no_byte() -> None:
    blocks = 5 * PIECE_BYTES // (2 * 8 * 64 * 2) - 9  # two pieces and a half for each layer
    memory = HostKV(SPECS, KVCacheConfig(blocks, 8), "bfloat16")
    for layer, cache in enumerate(memory.arrays):
        cache[0], cache[-2] = layer + 1, layer + 2
    assert all(_present(cache) < 1 for cache in memory.arrays)
    pieces = 0
    while memory.touch():
        pieces += 1
    if not pieces:
        pytest.skip("this kernel does not find pages ahead of their use")
    assert pieces == 3 * 3 and not memory.touch()
    assert all(_present(cache) == 1 for cache in memory.arrays)
    for layer, cache in enumerate(memory.arrays):
        assert (cache[0] == layer + 1).all() and (cache[-2] == layer + 2).all()
        assert not cache[1:-2].any() and not cache[-1].any()


def test_a_kernel_that_refuses_ends_the_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "_POPULATE_WRITE", 9999)
    memory = HostKV(SPECS, KVCacheConfig(5, 8), "bfloat16")
    assert not memory.touch() and not memory.touch()


def test_pages_are_given_back_and_the_caches_stay() -> None:
    blocks = 5 * PIECE_BYTES // (2 * 8 * 64 * 2) - 9
    memory = HostKV(SPECS, KVCacheConfig(blocks, 8), "bfloat16")
    for cache in memory.arrays:
        cache[:] = 3
        cache[-1] = 0
    places = [place(cache) for cache in memory.arrays]
    assert all(_present(cache) == 1 for cache in memory.arrays)
    memory.release()
    assert all(_present(cache) == 0 for cache in memory.arrays) and not memory.touch()
    memory.restore()
    assert [place(cache) for cache in memory.arrays] == places
    assert not any(cache[-1].any() for cache in memory.arrays) and memory.touch()


def test_float32_is_kept_as_it_is() -> None:
    arrays = HostKV(SPECS, KVCacheConfig(5, 8), "float32").arrays
    assert all(array.dtype == np.float32 and array.shape == (5 * 8 + PROBE_TOKENS + 1, 64) for array in arrays)


def test_blocks_are_copied_in_order_and_once_in_shared_arrays() -> None:
    groups = (LayerGroup(4, (0, 2)), LayerGroup(None, (1,)))
    memory = HostKV(SPECS, KVCacheConfig(5, 8, groups), "bfloat16")
    for number, cache in enumerate((memory.arrays[0], memory.arrays[2])):
        cache[:] = np.arange(len(cache), dtype=np.uint16)[:, None] + 1000 * number
    before = [cache.copy() for cache in memory.arrays]
    # The source of the first is the target of the second: layers that share an array must not see both twice.
    memory.copy_blocks([(1, 3), (2, 1)])
    for cache, old in zip(memory.arrays, before, strict=True):
        assert (cache[24:32] == old[8:16]).all() and (cache[8:16] == old[16:24]).all()
        same = [*range(8), *range(16, 24), *range(32, len(cache))]
        assert (cache[same] == old[same]).all()
