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
            blind = chunk.blind if chunk.blind is not None else torch.zeros(chunk.bias.shape[:2], dtype=torch.bool)
            mine = [pair for pair in pairs if not blind[pair, token]]
            seen[target] = [int(s) for pair in mine for s in slots[pair][chunk.bias[pair, token] == 0]]
        # No query, padding included, may meet a tile in which it sees nothing, or it is named as blind there.
        assert bool((chunk.bias == 0).any(-1).all())
        assert chunk.blind is None or bool((chunk.bias[chunk.blind] == 0).all() and chunk.blind.any())
    return seen


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 16, 100]),
    window=st.sampled_from([None, None, 1, 16, 100, 128, 200]),
)
def test_every_query_sees_its_window_and_nothing_else(
    requests: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    needed = [-(-(computed + count) // block_size) for computed, count in requests]
    order = np.random.default_rng(0).permutation(sum(needed))
    tables = np.split(order[None], np.cumsum(needed)[:-1], axis=1)
    num_slots = sum(needed) * block_size
    (metadata,) = build_attention_metadata(
        [count for _, count in requests],
        [computed for computed, _ in requests],
        tables,
        block_size,
        num_slots,
        CPU,
        window,
    )
    seen = seen_slots(metadata)
    row = 0
    for (computed, count), (table,) in zip(requests, tables, strict=True):
        slots = [int(table[p // block_size]) * block_size + p % block_size for p in range(computed + count)]
        for position in range(computed, computed + count):
            assert metadata.write_slots[row] == slots[position]
            assert seen[row] == slots[0 if window is None else max(position - window + 1, 0) : position + 1]
            row += 1
    assert len(seen) == row == len(metadata.write_slots)


def test_a_decode_step_of_one_chunk_needs_no_reordering() -> None:
    tables = [np.array([[2]]), np.array([[0]])]
    (decode,) = build_attention_metadata([1, 1], [3, 5], tables, 16, 48, CPU)
    assert [chunk.whole for chunk in decode.chunks] == [True]
    (mixed,) = build_attention_metadata([1, 2], [3, 5], tables, 16, 48, CPU)
    assert not any(chunk.whole for chunk in mixed.chunks)


def test_the_gather_is_bounded() -> None:
    tables = [np.arange(100)[None] + 100 * i for i in range(10)]
    (metadata,) = build_attention_metadata([1] * 10, [1000] * 10, tables, 16, 16000, CPU)
    assert len(metadata.chunks) == -(-10 * 8 // MAX_PAIRS)
    assert all(len(chunk.pair_segments) <= MAX_PAIRS for chunk in metadata.chunks)
    (alone,) = build_attention_metadata([1], [9000], [np.arange(600)[None]], 16, 9600, CPU)
    assert len(alone.chunks) == 1


def test_groups_differ_in_slots_alone() -> None:
    tables = [np.array([[2, 4], [0, 1]]), np.array([[3], [5]])]
    first, second = build_attention_metadata([20, 1], [0, 5], tables, 16, 96, CPU, 30)
    assert first.write_slots.tolist() == [*range(32, 48), *range(64, 68), 53]
    assert second.write_slots.tolist() == [*range(20), 85]
    assert seen_slots(first)[20] == list(range(48, 54)) and seen_slots(second)[20] == list(range(80, 86))
    for one, other in zip(first.chunks, second.chunks, strict=True):
        assert one.bias is other.bias and not torch.equal(one.key_slots, other.key_slots)


def test_blocks_before_the_window_are_not_read() -> None:
    """Whatever stands in the table there, also nothing at all; and no tile before the window is visited."""
    gone = np.array([[-1] * 37 + [9, 8, 7]])
    (metadata,) = build_attention_metadata([1], [630], [gone], 16, 160, CPU, 33)
    assert seen_slots(metadata)[0] == [*range(150, 160), *range(128, 144), *range(112, 119)]
    assert [chunk.tile_sizes for chunk in metadata.chunks] == [(1,)]
    (metadata,) = build_attention_metadata([20], [600], [gone], 16, 160, CPU, 9)
    slots = torch.cat([chunk.key_slots for chunk in metadata.chunks])
    assert bool(((slots >= 112) & (slots <= 160)).all())


def test_an_empty_step() -> None:
    (metadata,) = build_attention_metadata([], [], [], 16, 160, CPU)
    assert metadata.chunks == () and len(metadata.write_slots) == 0
