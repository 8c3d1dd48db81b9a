"""LayerViews: which layer group's block table each layer reads, and how far back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evensong.layers.attention.metadata import AttentionMetadata, build_attention_metadata
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, groups_of_layers
from evensong.worker.batch import Batch


class LayerViews:
    """Made once from the layers and their groups; makes each step's attention metadata."""

    def __init__(self, specs: Sequence[LayerKVSpec], kv_cache: KVCacheConfig) -> None:
        self._block_size = kv_cache.block_size
        self.num_groups = len(kv_cache.groups)
        group_of = groups_of_layers(specs, kv_cache.groups)
        self._views = {spec.layer: (spec.window, group_of[spec.layer]) for spec in specs}
        # By window: the groups with such layers. Their tables differ, what their queries see does not.
        self._groups: dict[int | None, list[int]] = {}
        for window, group in sorted(set(self._views.values()), key=lambda view: view[1]):
            self._groups.setdefault(window, []).append(group)

    def metadata(self, batch: Batch, num_slots: int, device: torch.device) -> dict[int, AttentionMetadata]:
        """By layer; layers of one group and window share it."""
        built: dict[tuple[int | None, int], AttentionMetadata] = {}
        for window, groups in self._groups.items():
            tables = batch.block_tables
            if len(groups) < self.num_groups:
                tables = [table[groups] for table in tables]
            made = build_attention_metadata(
                batch.num_query_tokens,
                batch.num_computed_tokens,
                tables,
                self._block_size,
                num_slots,
                device,
                window,
            )
            built.update({(window, group): metadata for group, metadata in zip(groups, made, strict=True)})
        return {layer: built[view] for layer, view in self._views.items()}
