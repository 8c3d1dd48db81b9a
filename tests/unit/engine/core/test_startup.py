"""What a core learns: pool, length, step size, fingerprint."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evensong.config.resolve import resolve
from evensong.engine.core.startup import MIN_BATCHED_TOKENS, fingerprint_of, initialize_kv_caches
from evensong.observe.phases import Phases
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup, LayerKVSpec, Resources
from evensong.testing.fake_executor import FakeExecutor


def learn(
    learned: Resources | None = None,
    rate: float = 4000.0,
    windows: tuple[int | None, ...] = (None,),
    **settings: Any,
) -> tuple[Resources, FakeExecutor]:
    executor = FakeExecutor(windows=windows)
    executor.measure_token_rate = lambda: rate  # type: ignore[method-assign]
    try:
        return initialize_kv_caches(resolve({"model": "demo"} | settings), executor, learned, Phases()), executor
    finally:
        executor.shutdown()


def test_auto_takes_the_models_own_length_where_it_fits() -> None:
    resources, executor = learn()
    assert resources.max_model_len == 4096 and resources.max_num_seqs == 64
    assert resources.num_blocks == 64 * 2048 // 16
    assert resources.kv_cache_bytes == resources.num_blocks * 16 * 64
    assert executor.kv_cache == KVCacheConfig(resources.num_blocks, 16, (LayerGroup(None, (0,)),), 64, 2048)


def test_auto_is_reduced_to_what_fits_and_a_number_is_refused() -> None:
    assert learn(num_kv_blocks_override=10)[0].max_model_len == 160
    with pytest.raises(ConfigError, match=r"max_model_len 161 needs .* at most 160 tokens"):
        learn(num_kv_blocks_override=10, max_model_len=161)
    with pytest.raises(ConfigError, match="own limit of 4096"):
        learn(max_model_len=4097)


def test_a_hybrid_is_laid_out_in_layer_groups() -> None:
    settings: dict[str, Any] = {"windows": (512, 512, None), "max_num_batched_tokens": 1024, "max_num_seqs": 4}
    resources, executor = learn(**settings)
    assert executor.kv_cache is not None and executor.kv_cache.groups == resources.layer_groups
    assert [group.window for group in resources.layer_groups] == [512, 512, None]
    # One layer of 64 bytes a token; windows hold less than the full length.
    assert resources.kv_cache_bytes == resources.num_blocks * 16 * 64
    assert resources.num_blocks == (4 * 2048 + 2 * (4 * 512 + 1024)) // 16
    assert learn(**settings, num_kv_blocks_override=97 + 97 + 100)[0].max_model_len == 1600
    sliding: dict[str, Any] = {"windows": (512,), "max_num_batched_tokens": 1024}
    assert learn(**sliding, num_kv_blocks_override=97)[0].max_model_len == 4096, "more than the pool of 1,552 tokens"
    assert learn(**sliding, num_kv_blocks_override=96)[0].max_model_len == 1536
    assert learn(windows=(512,), num_kv_blocks_override=161)[0].max_model_len == 4096, "a step of 2,048 at most"


def test_a_step_lasts_a_quarter_of_a_second_within_bounds() -> None:
    assert learn()[0].max_num_batched_tokens == 992
    assert learn(step_seconds=0.125)[0].max_num_batched_tokens == 496
    assert learn(rate=1.0, max_num_seqs=4)[0].max_num_batched_tokens == MIN_BATCHED_TOKENS
    assert learn(rate=1.0, max_num_seqs=100)[0].max_num_batched_tokens in range(100, 128)
    assert learn(rate=1e9)[0].max_num_batched_tokens == 2048
    assert learn(max_num_batched_tokens=7)[0].max_num_batched_tokens == 7


def test_without_chunks_a_step_holds_the_longest_request() -> None:
    assert learn(enable_chunked_prefill=False)[0].max_num_batched_tokens == 4096
    with pytest.raises(ConfigError, match=r"\(100\) must be at least max_model_len \(200\)"):
        learn(enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=200)


def test_a_replacement_comes_up_with_the_first_ones_values() -> None:
    first, _ = learn(rate=2000.0)
    small = msgspec.structs.replace(first, num_blocks=300, max_model_len=1000)
    again, _ = learn(small, rate=9000.0)
    assert (again.num_blocks, again.max_model_len) == (300, 1000)
    assert again.max_num_batched_tokens == first.max_num_batched_tokens


def test_the_fingerprint_follows_every_part() -> None:
    assert learn()[0].fingerprint == learn(max_num_seqs=3)[0].fingerprint
    assert learn()[0].fingerprint != learn(max_model_len=100)[0].fingerprint
    assert fingerprint_of({"a": "1", "b": "2"}) == fingerprint_of({"b": "2", "a": "1"}) != fingerprint_of({"a": "1"})


def test_the_rank_with_room_for_the_fewest_blocks_decides() -> None:
    """Two stages of two layers and one, each shared by two parts of two KV heads and one."""
    ranks = [
        [LayerKVSpec(layer, heads, 8, "float32", 4) for layer in layers]
        for layers in ((0, 1), (2,))
        for heads in (2, 1)
    ]
    per_block = [16 * 64 * len(specs) * specs[0].num_kv_heads for specs in ranks]
    assert per_block == [4096, 2048, 2048, 1024]

    def sized(memory: list[int], **settings: Any) -> tuple[Resources, FakeExecutor]:
        executor = FakeExecutor()
        executor.get_kv_cache_specs = lambda: ranks  # type: ignore[method-assign]
        executor.determine_available_memory = lambda: memory  # type: ignore[method-assign]
        try:
            config = resolve({"model": "demo", "max_num_batched_tokens": 64} | settings)
            return initialize_kv_caches(config, executor, None, Phases()), executor
        finally:
            executor.shutdown()

    plenty = [1 << 30] * 4
    resources, executor = sized(plenty, kv_cache_memory_bytes=1 << 20)
    assert resources.num_blocks == (1 << 20) // 4096, "bytes are each rank's: the fullest one has the fewest blocks"
    assert resources.kv_cache_bytes == resources.num_blocks * sum(per_block)
    assert resources.max_model_len == 4096 == resources.num_blocks * 16
    assert executor.kv_cache is not None and executor.kv_cache.groups == (LayerGroup(None, (0, 1, 2)),)
    # A quarter of what is free; here the rank with the least memory is not the one with the most layers.
    resources, _ = sized([1 << 30, 1 << 30, 1 << 17, 1 << 30])
    assert resources.num_blocks == (1 << 15) // 2048 and resources.max_model_len == 16 * 16
    with pytest.raises(ConfigError, match=r"asks for 1,048,576 bytes of KV cache; 131,072 are free"):
        sized([1 << 30, 1 << 30, 1 << 17, 1 << 30], kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"max_model_len 4096 needs 524,288 bytes of KV cache; there are 32,768"):
        sized([1 << 30, 1 << 30, 1 << 17, 1 << 30], max_model_len=4096)
