"""Pool sizes and fitted lengths: figures that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.kvcache.layout import KVLayout
from evensong.kvcache.sizing import CPU_POOL_BYTES, default_pool_bytes, fit_max_model_len, size_pool
from evensong.protocol.errors import ConfigError

PER_BLOCK = 3 * 64 * 16  # 3 layers of 64 bytes a token, 16 tokens
FULL = KVLayout(16)
# Two groups with a window of 64 and one that keeps all; steps of up to 32 tokens.
HYBRID = KVLayout(16, (64, None, 64), 32)
SLIDING = KVLayout(16, (64,), 32)


def size(layout: KVLayout = FULL, **changes: Any) -> int:
    settings: dict[str, Any] = {
        "available": 1 << 40,
        "device": "cpu",
        "max_num_seqs": 4,
        "max_model_len": 100,
        "kv_cache_memory_bytes": None,
        "num_blocks_override": None,
    }
    return size_pool(layout, PER_BLOCK, **(settings | changes))


def test_the_default_pool_holds_what_the_sequences_need() -> None:
    assert size() == 4 * 100 // 16
    assert size(max_num_seqs=1, max_model_len=10_000) >= -(-10_000 // 16), "one sequence of the whole length"
    assert size(available=3 * 64 * 16 * 40) == 10, "a quarter of what is free"
    assert default_pool_bytes(1 << 40, 1 << 40, device="cpu") == CPU_POOL_BYTES
    assert default_pool_bytes(123, 1 << 40, device="cuda") == 123


def test_what_was_asked_for_is_taken() -> None:
    assert size(num_blocks_override=7) == 7
    assert size(kv_cache_memory_bytes=3 * 64 * 16 * 5 + 1) == 5


def test_more_than_there_is_is_refused_with_the_figures() -> None:
    """Memory is taken as tokens are written: without this the engine would start, and die under load."""
    assert size(num_blocks_override=7, available=7 * PER_BLOCK) == 7
    with pytest.raises(ConfigError, match=r"--num-kv-blocks-override 7 asks for 21,504 bytes.*; 21,503 are free"):
        size(num_blocks_override=7, available=7 * PER_BLOCK - 1)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 30000 asks for 30,000 bytes.*; 29,999 are free"):
        size(kv_cache_memory_bytes=30_000, available=29_999)


def test_a_pool_of_less_than_two_blocks_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"at least 6,144 bytes.*there are 5,000"):
        size(kv_cache_memory_bytes=5000)


def test_lengths_are_fitted_or_refused_with_the_figures() -> None:
    assert fit_max_model_len("auto", 4096, 10, FULL, 1000) == 160
    assert fit_max_model_len("auto", 100, 10, FULL, 1000) == 100
    assert fit_max_model_len(160, 4096, 10, FULL, 1000) == 160
    with pytest.raises(ConfigError, match="more than the model's own limit of 4096"):
        fit_max_model_len(4097, 4096, 1000, FULL, 1000)
    with pytest.raises(ConfigError, match=r"161 needs 11,000 bytes.*there are 10,000.*at most 160 tokens"):
        fit_max_model_len(161, 4096, 10, FULL, 1000)


def test_windows_bound_what_a_sequence_counts() -> None:
    """Beyond its window a sequence takes nothing, but for the tokens of one step."""
    assert size(HYBRID, max_model_len=1000) == (4 * 1000 + 2 * (4 * 64 + 32)) // 16
    assert size(HYBRID, max_model_len=50) == 3 * 4 * 50 // 16, "shorter than the window"
    one = size(HYBRID, max_num_seqs=1, max_model_len=10_000)
    assert one == HYBRID.peak_blocks(10_000) == 625 + 2 * 7, "one sequence of the whole length"
    with pytest.raises(ConfigError, match=r"at least 18,432 bytes \(2 blocks of 16 tokens in each layer group\)"):
        size(HYBRID, kv_cache_memory_bytes=18_431)


def test_lengths_follow_the_groups_that_keep_all() -> None:
    assert fit_max_model_len("auto", 4096, 14 + 20, HYBRID, 1000) == 320
    assert fit_max_model_len(320, 4096, 14 + 20, HYBRID, 1000) == 320
    with pytest.raises(ConfigError, match=r"321 needs 35,000 bytes.*34,000.*320 tokens.*max-num-batched-tokens"):
        fit_max_model_len(321, 4096, 14 + 20, HYBRID, 1000)
    with pytest.raises(ConfigError, match="one token needs 3 KV blocks.*there are 2"):
        fit_max_model_len("auto", 4096, 2, HYBRID, 1000)


def test_a_window_alone_lets_requests_be_longer_than_the_pool() -> None:
    assert fit_max_model_len("auto", 4096, 7, SLIDING, 1000) == fit_max_model_len(4096, 4096, 7, SLIDING, 1000) == 4096
    assert fit_max_model_len("auto", 4096, 6, SLIDING, 1000) == 6 * 16, "a step and its window do not fit"
