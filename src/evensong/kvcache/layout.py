"""Layer groups: which layers share a block table, and how many blocks a request needs in all of them.

A block is one group's memory for `block_size` tokens. All groups have the same number of layers and the same bytes per
token, so that one pool serves them all: the i-th layers of all groups share cache tensor i, each in blocks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evensong.protocol.kv_spec import LayerGroup, LayerKVSpec, own_layers


def group_layers(specs: Sequence[LayerKVSpec]) -> tuple[LayerGroup, ...]:
    """The layer groups of a model; a model whose layers are all of one kind has one.

    A group has as many layers as the rarest kind (or as the commonest, where that is less than half as many again); a
    kind's last group may have fewer, and the rest of its blocks lies unused. Layers that differ in bytes per token
    cannot share tensors: they all stand in one group that keeps every block, and windows are only masked.
    """
    kinds: dict[int | None, list[int]] = {}
    for spec in specs:
        kinds.setdefault(spec.window, []).append(spec.layer)
    if len(kinds) > 1 and len({spec.bytes_per_token for spec in specs}) > 1:
        kinds = {None: [spec.layer for spec in specs]}
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < 1.5 * fewest else fewest
    return tuple(
        LayerGroup(window, tuple(layers[start : start + size]))
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


def merge_specs(ranks: Sequence[Sequence[LayerKVSpec]]) -> list[LayerKVSpec]:
    """The specs of all layers of a model, from those of its ranks; of a layer that ranks share, the largest part."""
    found: dict[int, LayerKVSpec] = {}
    for spec in (spec for specs in ranks for spec in specs):
        other = found.get(spec.layer)
        if other is None or spec.bytes_per_token > other.bytes_per_token:
            found[spec.layer] = spec
    return [found[layer] for layer in sorted(found)]


def bytes_per_block(specs: Sequence[LayerKVSpec], groups: Sequence[LayerGroup], block_size: int) -> int:
    """Bytes of one block in all cache tensors of a rank, whose layers' specs these are; `groups`: the whole model's."""
    by_layer = {spec.layer: spec for spec in specs}
    sizes = [sum(by_layer[layer].bytes_per_token for layer in layers) for layers in own_layers(specs, groups)]
    return max(sizes) * block_size


@dataclass(frozen=True)
class KVLayout:
    """What requests take of the pool. `windows`: one entry a layer group, None where it keeps every block.

    `max_step_tokens`: the most tokens of a request that one step computes; only windows ask for it.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_step_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.windows and (self.max_step_tokens > 0 or not any(self.windows))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take in one group that keeps all."""
        return -(-num_tokens // self.block_size)

    def first_block(self, position: int, window: int | None) -> int:
        """Index of the first block that the window of a token at `position`, or later, reaches into."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def most_blocks(self, window: int | None) -> int | None:
        """The most blocks that a request of any length holds in a group at once; None where there is no limit."""
        if window is None:
            return None
        # The first token of a step sees window - 1 before it; the span may start at the end of a block.
        return 1 + self.blocks_for(window + self.max_step_tokens - 2)

    def peak_blocks(self, num_tokens: int) -> int:
        """Blocks that a request holds, in all groups, when it needs most on its way to `num_tokens` tokens."""
        return self._peak(self.blocks_for(num_tokens))

    def capacity(self, num_blocks: int) -> int | None:
        """The longest request, in tokens, that a pool of `num_blocks` can hold alone; None where any fits."""
        limits = [self.most_blocks(window) for window in self.windows]
        if None not in limits and sum(limit or 0 for limit in limits) <= num_blocks:
            return None
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._peak(middle) <= num_blocks else (low, middle - 1)
        return low * self.block_size

    def _peak(self, blocks: int) -> int:
        limits = (self.most_blocks(window) for window in self.windows)
        return sum(blocks if limit is None else min(blocks, limit) for limit in limits)
