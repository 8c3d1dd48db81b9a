"""How KV memory is laid out: what layers need, and what they get."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# Stands in a block table where a layer group needs no block: the position lies before its window.
NULL_BLOCK = -1


class LayerKVSpec(msgspec.Struct, frozen=True, array_like=True):
    """What one attention layer of a rank keeps per token; `layer` is its number in the model.

    `dtype` is the cache dtype's torch name, e.g. "bfloat16".

    `window`: how many positions a query sees, its own included; None where it sees all before it.
    """

    layer: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    dtype_size: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token, in bytes."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_size


class LayerGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share a request's block table; the i-th layers of all groups share cache tensor i.

    Blocks that lie before the `window` of all tokens to come are given back; None keeps all. `layers` are the model's
    layer numbers; none named means all of them.
    """

    window: int | None = None
    layers: tuple[int, ...] = ()


def own_layers(specs: Sequence[LayerKVSpec], groups: Sequence[LayerGroup]) -> list[tuple[int, ...]]:
    """Of each group the layers that a rank has, whose specs these are; the i-th ones of all groups share tensor i."""
    numbers = [spec.layer for spec in specs]
    own = set(numbers)
    return [tuple(layer for layer in group.layers or numbers if layer in own) for group in groups]


def groups_of_layers(specs: Sequence[LayerKVSpec], groups: Sequence[LayerGroup]) -> dict[int, int]:
    """The group of each layer that a rank has."""
    return {layer: index for index, layers in enumerate(own_layers(specs, groups)) for layer in layers}


class KVCacheConfig(msgspec.Struct, frozen=True, array_like=True):
    """The pool that every rank allocates: `num_blocks` blocks, each of `block_size` tokens of one layer group.

    `max_num_seqs` and `max_num_batched_tokens`: the largest step that will use it.
    """

    num_blocks: int
    block_size: int
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


class ModelLimits(msgspec.Struct, frozen=True, array_like=True):
    """What a loaded model sets: its longest sequence in tokens, the ids of its tokenizer, and the device it runs on."""

    max_position_embeddings: int
    vocab_size: int
    device: str


class Resources(msgspec.Struct, frozen=True):
    """What a core learned at start-up; travels in READY, never written back into the config.

    `fingerprint` is the digest that determinism holds for; `fingerprint_parts` says what went into it.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    kv_cache_bytes: int
    fingerprint: str
    fingerprint_parts: dict[str, str]
    supported_tasks: tuple[str, ...] = ("generate",)
    deterministic: bool = True
    phases: dict[str, float] = {}
    layer_groups: tuple[LayerGroup, ...] = (LayerGroup(),)
