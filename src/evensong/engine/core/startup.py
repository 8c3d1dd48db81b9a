"""What a core works out at start-up: KV cache size, fitted length, step size, fingerprint (spec A2).

Learned values travel in a Resources of their own; the config is never changed.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version

from evensong.config.sections import EngineConfig
from evensong.executor.base import Executor
from evensong.kvcache.layout import KVLayout, bytes_per_block, group_layers, merge_specs
from evensong.kvcache.sizing import fit_max_model_len, size_pool
from evensong.observe.phases import Phases
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import KVCacheConfig, Resources
from evensong.protocol.wire import PROTOCOL_VERSION

DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
MIN_BATCHED_TOKENS = 64
# Matrix products run over tiles of this many rows: a step that fills them wastes nothing.
ROWS_PER_TILE = 16


def initialize_kv_caches(
    config: EngineConfig, executor: Executor, learned: Resources | None, phases: Phases
) -> Resources:
    """Sizes and allocates the KV cache on every rank and returns what was learned.

    `learned` is the first core's, for a replacement: it must come up with the same values. Raises ConfigError where
    what was asked for does not fit, with the figures.
    """
    limits = executor.get_model_limits()
    ranks = executor.get_kv_cache_specs()
    cache, scheduler = config.cache, config.scheduler
    max_num_seqs = scheduler.max_num_seqs or DEFAULT_MAX_NUM_SEQS[limits.device]
    asked = config.model.max_model_len
    wanted_len = limits.max_position_embeddings if asked == "auto" else min(asked, limits.max_position_embeddings)
    groups = group_layers(merge_specs(ranks))
    windows = tuple(group.window for group in groups)
    layout = KVLayout(cache.block_size, windows, _most_step_tokens(config, wanted_len, max_num_seqs))
    per_block = [bytes_per_block(specs, groups, cache.block_size) for specs in ranks]
    if learned is None:
        # The rank that has room for the fewest blocks decides: a block table is the same on all of them.
        num_blocks, tightest = min(
            (
                size_pool(
                    layout,
                    own,
                    available=available,
                    device=limits.device,
                    max_num_seqs=max_num_seqs,
                    max_model_len=wanted_len,
                    kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
                    num_blocks_override=cache.num_kv_blocks_override,
                ),
                own,
            )
            for own, available in zip(per_block, executor.determine_available_memory(), strict=True)
        )
        max_model_len = fit_max_model_len(asked, limits.max_position_embeddings, num_blocks, layout, tightest)
    else:
        num_blocks, max_model_len = learned.num_blocks, learned.max_model_len
    with phases.phase("allocate and warm up"):
        most_tokens = _most_step_tokens(config, max_model_len, max_num_seqs)
        executor.initialize_from_config(
            KVCacheConfig(num_blocks, cache.block_size, groups, max_num_seqs, most_tokens), max_model_len
        )
    with phases.phase("measure step rate"):
        batched = _step_size(config, executor, limits.device, max_num_seqs, max_model_len, learned)
    parts = executor.describe() | {
        "max_model_len": str(max_model_len),
        "protocol": str(PROTOCOL_VERSION),
        "grammars": grammar_libraries(),
    }
    return Resources(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        vocab_size=limits.vocab_size,
        kv_cache_bytes=num_blocks * sum(per_block),
        fingerprint=fingerprint_of(parts),
        fingerprint_parts=parts,
        deterministic=parts.get("deterministic", "yes") == "yes",
        layer_groups=groups,
    )


def fingerprint_of(parts: dict[str, str]) -> str:
    """One digest of everything that the bits of an answer depend on."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def grammar_libraries() -> str:
    """The libraries that say which tokens a constrained request may have, with their versions."""
    found = []
    for name in ("llguidance", "xgrammar"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _most_step_tokens(config: EngineConfig, max_model_len: int, max_num_seqs: int) -> int:
    """The most that `_step_size` will answer, known before the cache exists in which it is measured."""
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens is not None:
        return scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill:
        return max(max_model_len, DEFAULT_MAX_NUM_BATCHED_TOKENS)
    return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, _all_running(max_num_seqs))


def _all_running(max_num_seqs: int) -> int:
    """Tokens of a step in which every running request gets one; with fewer, some would starve."""
    return -(-max_num_seqs // ROWS_PER_TILE) * ROWS_PER_TILE


def _step_size(
    config: EngineConfig,
    executor: Executor,
    device: str,
    max_num_seqs: int,
    max_model_len: int,
    learned: Resources | None,
) -> int:
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens is not None:
        if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at least "
                f"max_model_len ({max_model_len})"
            )
        return scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill:
        return max(max_model_len, DEFAULT_MAX_NUM_BATCHED_TOKENS)
    if learned is not None:
        return learned.max_num_batched_tokens
    if device != "cpu":
        return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    tokens = int(executor.measure_token_rate() * scheduler.step_seconds) // ROWS_PER_TILE * ROWS_PER_TILE
    return max(min(tokens, DEFAULT_MAX_NUM_BATCHED_TOKENS), MIN_BATCHED_TOKENS, _all_running(max_num_seqs))
