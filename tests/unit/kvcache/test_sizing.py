"""Pool sizes and fitted lengths: figures that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.kvcache.sizing import CPU_POOL_BYTES, bytes_per_block, default_pool_bytes, fit_max_model_len, size_pool
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import LayerKVSpec

SPECS = [LayerKVSpec(layer, 2, 8, "bfloat16", 2) for layer in range(3)]  # 3 layers of 64 bytes a token


def size(**changes: Any) -> int:
    settings: dict[str, Any] = {
        "block_size": 16,
        "available": 1 << 40,
        "device": "cpu",
        "max_num_seqs": 4,
        "max_model_len": 100,
        "kv_cache_memory_bytes": None,
        "num_blocks_override": None,
    }
    return size_pool(SPECS, **(settings | changes))


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    assert bytes_per_block(SPECS, 16) == 3 * (2 * 2 * 8 * 2) * 16


def test_the_default_pool_holds_what_the_sequences_need() -> None:
    assert size() == 4 * 100 // 16
    assert size(max_num_seqs=1, max_model_len=10_000) >= -(-10_000 // 16), "one sequence of the whole length"
    assert size(available=3 * 64 * 16 * 40) == 10, "a quarter of what is free"
    assert default_pool_bytes(1 << 40, 1 << 40, 1, device="cpu") == CPU_POOL_BYTES
    assert default_pool_bytes(123, 1 << 40, 1, device="cuda") == 123


def test_what_was_asked_for_is_taken() -> None:
    assert size(num_blocks_override=7) == 7
    assert size(kv_cache_memory_bytes=3 * 64 * 16 * 5 + 1) == 5


def test_more_than_there_is_is_refused_with_the_figures() -> None:
    """Memory is taken as tokens are written: without this the engine would start, and die under load."""
    per_block = 3 * 64 * 16
    assert size(num_blocks_override=7, available=7 * per_block) == 7
    with pytest.raises(ConfigError, match=r"--num-kv-blocks-override 7 asks for 21,504 bytes.*; 21,503 are free"):
        size(num_blocks_override=7, available=7 * per_block - 1)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 30000 asks for 30,000 bytes.*; 29,999 are free"):
        size(kv_cache_memory_bytes=30_000, available=29_999)


def test_a_pool_of_less_than_two_blocks_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"at least 6,144 bytes.*there are 5,000"):
        size(kv_cache_memory_bytes=5000)


def test_lengths_are_fitted_or_refused_with_the_figures() -> None:
    assert fit_max_model_len("auto", 4096, 10, 16, 1000) == 160
    assert fit_max_model_len("auto", 100, 10, 16, 1000) == 100
    assert fit_max_model_len(160, 4096, 10, 16, 1000) == 160
    with pytest.raises(ConfigError, match="more than the model's own limit of 4096"):
        fit_max_model_len(4097, 4096, 1000, 16, 1000)
    with pytest.raises(ConfigError, match=r"161 needs 11,000 bytes.*there are 10,000.*at most 160 tokens"):
        fit_max_model_len(161, 4096, 10, 16, 1000)
