"""Each layer reads its own group's table, as far back as its window."""

from __future__ import annotations

import numpy as np
import torch

from evensong.kernels.attention import TILE_KEYS
from evensong.kvcache.layout import group_layers
from evensong.layers.attention.metadata import AttentionMetadata
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.worker.batch import Batch
from evensong.worker.layer_views import LayerViews

NUM_SLOTS = 400


def metadata_of(specs: list[LayerKVSpec]) -> dict[int, AttentionMetadata]:
    """For one token at position 20; group g's block i is 10 g + i, of 4 tokens."""
    groups = group_layers(specs)
    views = LayerViews(specs, KVCacheConfig(100, 4, groups))
    table = np.arange(6) + 10 * np.arange(len(groups))[:, None]
    batch = Batch(np.array([7]), [1], [20], [table.astype(np.int32)], np.array([0]))
    return views.metadata(batch, NUM_SLOTS, torch.device("cpu"))


def seen(metadata: AttentionMetadata) -> list[int]:
    (chunk,) = metadata.chunks
    slots = chunk.key_slots.view(-1, TILE_KEYS)[chunk.bias[:, 0] == 0].tolist()
    assert metadata.write_slots.tolist() == slots[-1:]
    return slots


def test_a_model_of_one_kind_builds_once() -> None:
    made = metadata_of([LayerKVSpec(i, 1, 8, "float32", 4) for i in range(3)])
    assert made[0] is made[1] is made[2] and seen(made[0]) == list(range(21))


def test_layers_of_a_hybrid_read_their_own_blocks() -> None:
    windows = (6, None, 6, None, 6, None, 6)
    made = metadata_of([LayerKVSpec(i, 1, 8, "float32", 4, window) for i, window in enumerate(windows)])
    # Four layers with a window and three without: one group each, the second one a layer short.
    assert made[0] is made[2] is made[4] is made[6] and made[1] is made[3] is made[5]
    assert seen(made[0]) == list(range(15, 21)) and seen(made[1]) == list(range(40, 61))


def test_layers_of_different_widths_share_blocks_and_keep_their_windows() -> None:
    specs = [LayerKVSpec(0, 1, 8, "float32", 4, 6), LayerKVSpec(1, 2, 8, "float32", 4), LayerKVSpec(2, 1, 8, "f", 4, 3)]
    assert [seen(one) for one in metadata_of(specs).values()] == [
        list(range(15, 21)),
        list(range(21)),
        list(range(18, 21)),
    ]
