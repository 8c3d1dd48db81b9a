"""What a step's metadata says about each token: where it is written, which keys it sees."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.kernels.attention import TILE_KEYS
from evensong.layers.attention.metadata import MAX_PAIRS, AttentionMetadata, build_attention_metadata

CPU = torch.device("cpu")


def seen_slots(metadata: AttentionMetadata) -> dict[int, list[int]]:
    """For each token row: the cache rows of its visible keys, tile by tile."""
    seen: dict[int, list[int]] = {}
    for chunk in metadata.chunks:
        slots = chunk.key_slots.view(-1, TILE_KEYS)
        for output, target in zip(chunk.output_rows.tolist(), chunk.target_rows.tolist(), strict=True):
            segment, token = divmod(output, chunk.segment_tokens)
            assert chunk.query_rows[output] == target and target not in seen
            sizes = chunk.tile_sizes
            assert sum(sizes) == len(slots) and sorted(sizes, reverse=True) == list(sizes)
            pairs = [sum(sizes[:tile]) + segment for tile, size in enumerate(sizes) if segment < size]
            assert all(chunk.pair_segments[pair] == segment for pair in pairs)
            seen[target] = [int(s) for pair in pairs for s in slots[pair][chunk.bias[pair, token] == 0]]
        # No query, padding included, may meet a tile in which it sees nothing.
        assert bool((chunk.bias == 0).any(-1).all())
    return seen


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 16, 100]),
)
def test_every_query_sees_its_past_and_nothing_else(requests: list[tuple[int, int]], block_size: int) -> None:
    needed = [-(-(computed + count) // block_size) for computed, count in requests]
    order = np.random.default_rng(0).permutation(sum(needed))
    tables = np.split(order, np.cumsum(needed)[:-1])
    num_slots = sum(needed) * block_size
    metadata = build_attention_metadata(
        [count for _, count in requests], [computed for computed, _ in requests], tables, block_size, num_slots, CPU
    )
    seen = seen_slots(metadata)
    row = 0
    for (computed, count), table in zip(requests, tables, strict=True):
        slots = [int(table[p // block_size]) * block_size + p % block_size for p in range(computed + count)]
        for position in range(computed, computed + count):
            assert metadata.write_slots[row] == slots[position]
            assert seen[row] == slots[: position + 1]
            row += 1
    assert len(seen) == row == len(metadata.write_slots)


def test_a_decode_step_of_one_chunk_needs_no_reordering() -> None:
    tables = [np.array([2]), np.array([0])]
    decode = build_attention_metadata([1, 1], [3, 5], tables, 16, 48, CPU)
    assert [chunk.whole for chunk in decode.chunks] == [True]
    mixed = build_attention_metadata([1, 2], [3, 5], tables, 16, 48, CPU)
    assert not any(chunk.whole for chunk in mixed.chunks)


def test_the_gather_is_bounded() -> None:
    tables = [np.arange(100) + 100 * i for i in range(10)]
    metadata = build_attention_metadata([1] * 10, [1000] * 10, tables, 16, 16000, CPU)
    assert len(metadata.chunks) == -(-10 * 8 // MAX_PAIRS)
    assert all(len(chunk.pair_segments) <= MAX_PAIRS for chunk in metadata.chunks)
    alone = build_attention_metadata([1], [9000], [np.arange(600)], 16, 9600, CPU)
    assert len(alone.chunks) == 1


def test_an_empty_step() -> None:
    metadata = build_attention_metadata([], [], [], 16, 160, CPU)
    assert metadata.chunks == () and len(metadata.write_slots) == 0
