"""How many blocks, and how long a request may be: pure functions of what layers need and what memory there is (A2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import LayerKVSpec

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
CPU_POOL_SHARE = 4
POOL_TOKENS_PER_SEQUENCE = 2048


def bytes_per_block(specs: Sequence[LayerKVSpec], block_size: int) -> int:
    """Bytes of one block in all layers."""
    return sum(spec.bytes_per_token for spec in specs) * block_size


def default_pool_bytes(available: int, wanted_tokens: int, bytes_per_token: int, *, device: str) -> int:
    """Memory of the pool where nothing was asked for.

    On CPU: what the sequences need, at most 2 GiB and a quarter of the free memory; on a device all that is available.
    """
    if device != "cpu":
        return available
    return min(wanted_tokens * bytes_per_token, CPU_POOL_BYTES, available // CPU_POOL_SHARE)


def size_pool(
    specs: Sequence[LayerKVSpec],
    *,
    block_size: int,
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
    per_block = bytes_per_block(specs, block_size)
    if num_blocks_override is not None:
        _check_memory("--num-kv-blocks-override", num_blocks_override, num_blocks_override * per_block, available)
        return num_blocks_override
    if kv_cache_memory_bytes is not None:
        _check_memory("--kv-cache-memory-bytes", kv_cache_memory_bytes, kv_cache_memory_bytes, available)
        budget = kv_cache_memory_bytes
    else:
        per_token = per_block // block_size
        wanted = max(max_num_seqs * min(max_model_len, POOL_TOKENS_PER_SEQUENCE), max_model_len + block_size)
        budget = default_pool_bytes(available, wanted, per_token, device=device)
    if budget // per_block < 2:
        raise ConfigError(
            f"the KV cache needs at least {2 * per_block:,} bytes (2 blocks of {block_size} tokens); there are "
            f"{budget:,}: raise --kv-cache-memory-bytes or free memory"
        )
    return budget // per_block


def _check_memory(flag: str, value: int, needed: int, available: int) -> None:
    if needed > available:
        raise ConfigError(f"{flag} {value} asks for {needed:,} bytes of KV cache; {available:,} are free")


def fit_max_model_len(
    asked: int | Literal["auto"], model_limit: int, num_blocks: int, block_size: int, per_block: int
) -> int:
    """The longest request, in tokens of prompt plus output, that the model and the pool allow.

    `auto` takes the model's limit reduced to what fits; a number beyond either is a ConfigError with the figures.
    """
    fits = num_blocks * block_size
    if asked == "auto":
        return min(model_limit, fits)
    if asked > model_limit:
        raise ConfigError(f"max_model_len {asked} is more than the model's own limit of {model_limit} tokens")
    if asked > fits:
        needed = -(-asked // block_size) * per_block
        raise ConfigError(
            f"max_model_len {asked} needs {needed:,} bytes of KV cache; there are {num_blocks * per_block:,}, in which "
            f"at most {fits} tokens fit: lower --max-model-len, or raise --kv-cache-memory-bytes"
        )
    return asked
