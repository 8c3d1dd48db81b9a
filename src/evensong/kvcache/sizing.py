"""How many blocks, and how long a request may be: pure functions of what layers need and what memory there is (A2)."""

from __future__ import annotations

from typing import Literal

from evensong.kvcache.layout import KVLayout
from evensong.protocol.errors import ConfigError

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
CPU_POOL_SHARE = 4
POOL_TOKENS_PER_SEQUENCE = 2048


def default_pool_bytes(available: int, wanted: int, *, device: str) -> int:
    """Memory of the pool where nothing was asked for.

    On CPU: what the sequences need, at most 2 GiB and a quarter of the free memory; on a device all that is available.
    """
    if device != "cpu":
        return available
    return min(wanted, CPU_POOL_BYTES, available // CPU_POOL_SHARE)


def size_pool(
    layout: KVLayout,
    per_block: int,
    *,
    available: int,
    device: str,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory_bytes: int | None,
    num_blocks_override: int | None,
) -> int:
    """Number of blocks in the pool; raises ConfigError when not even one sequence step fits, or memory is too small.

    `max_model_len` is the model's limit or the user's; the default pool holds max_num_seqs sequences of it, counted up
    to 2,048 tokens each, and never less than one sequence of the whole length where memory allows.
    """
    if num_blocks_override is not None:
        _check_memory("--num-kv-blocks-override", num_blocks_override, num_blocks_override * per_block, available)
        return num_blocks_override
    if kv_cache_memory_bytes is not None:
        _check_memory("--kv-cache-memory-bytes", kv_cache_memory_bytes, kv_cache_memory_bytes, available)
        budget = kv_cache_memory_bytes
    else:
        tokens = _wanted_tokens(layout, max_num_seqs, min(max_model_len, POOL_TOKENS_PER_SEQUENCE))
        wanted = max(tokens * per_block // layout.block_size, layout.peak_blocks(max_model_len) * per_block)
        budget = default_pool_bytes(available, wanted, device=device)
    least = 2 * len(layout.windows)
    if budget // per_block < least:
        raise ConfigError(
            f"the KV cache needs at least {least * per_block:,} bytes (2 blocks of {layout.block_size} tokens"
            f"{' in each layer group' if least > 2 else ''}); there are {budget:,}: raise --kv-cache-memory-bytes or "
            "free memory"
        )
    return budget // per_block


def _wanted_tokens(layout: KVLayout, max_num_seqs: int, length: int) -> int:
    """Tokens in all groups of that many sequences; beyond their windows, those of one step."""
    wanted = 0
    for window in layout.windows:
        all_tokens = max_num_seqs * length
        wanted += all_tokens if window is None else min(all_tokens, max_num_seqs * window + layout.max_step_tokens)
    return wanted


def _check_memory(flag: str, value: int, needed: int, available: int) -> None:
    if needed > available:
        raise ConfigError(f"{flag} {value} asks for {needed:,} bytes of KV cache; {available:,} are free")


def fit_max_model_len(
    asked: int | Literal["auto"], model_limit: int, num_blocks: int, layout: KVLayout, per_block: int
) -> int:
    """The longest request, in tokens of prompt plus output, that the model and the pool allow.

    `auto` takes the model's limit reduced to what fits; a number beyond either is a ConfigError with the figures.
    """
    capacity = layout.capacity(num_blocks)
    fits = model_limit if capacity is None else capacity
    if asked == "auto":
        if fits < 1:
            needed = layout.peak_blocks(1)
            raise ConfigError(
                f"a request of one token needs {needed} KV blocks, one in each layer group; there are {num_blocks}: "
                "raise --num-kv-blocks-override or --kv-cache-memory-bytes"
            )
        return min(model_limit, fits)
    if asked > model_limit:
        raise ConfigError(f"max_model_len {asked} is more than the model's own limit of {model_limit} tokens")
    if asked > fits:
        needed = layout.peak_blocks(asked) * per_block
        less = "--max-model-len or --max-num-batched-tokens" if any(layout.windows) else "--max-model-len"
        raise ConfigError(
            f"max_model_len {asked} needs {needed:,} bytes of KV cache; there are {num_blocks * per_block:,}, in which "
            f"at most {fits} tokens fit: lower {less}, or raise --kv-cache-memory-bytes"
        )
    return asked
