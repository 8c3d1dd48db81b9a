"""AttentionMetadata: where a step's tokens write and read keys and values; built once a step, shared by all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evensong.kernels.attention import SEGMENT_TOKENS, TILE_KEYS, AttentionChunk

Int64 = np.ndarray[Any, np.dtype[np.int64]]

# Pairs of a segment and a key tile that are gathered at once: bounds the memory of long contexts.
# As few as keep their copy in the processor's cache.
MAX_PAIRS = 64


@dataclass(frozen=True)
class AttentionMetadata:
    """`write_slots` [num_tokens]: the cache row of each token; `chunks`: what each query reads."""

    write_slots: torch.Tensor
    chunks: tuple[AttentionChunk, ...]


@dataclass(frozen=True)
class _Segment:
    """Queries of one sequence: their first row and position, how many, and the sequence's cache rows."""

    row: int
    position: int
    count: int
    slots: Int64


def build_attention_metadata(
    num_query_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_tables: Sequence[Int64],
    block_size: int,
    num_slots: int,
    device: torch.device,
) -> AttentionMetadata:
    """From one entry a request, in row order. Row `num_slots` of the cache is the row of zeros."""
    write_slots: list[Int64] = []
    single: list[_Segment] = []
    several: list[_Segment] = []
    row = 0
    for count, computed, blocks in zip(num_query_tokens, num_computed_tokens, block_tables, strict=True):
        positions = np.arange(computed + count)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        write_slots.append(slots[computed:])
        if count == 1:
            single.append(_Segment(row, computed, 1, slots))
        else:
            several.extend(_segments(row, computed, count, slots))
        row += count
    chunks = [*_chunks(single, 1, num_slots, device), *_chunks(several, SEGMENT_TOKENS, num_slots, device)]
    if len(chunks) == 1 and not several and bool((chunks[0].query_rows.diff() > 0).all()):
        chunks = [replace(chunks[0], whole=True)]
    written = np.concatenate(write_slots) if write_slots else np.empty(0, dtype=np.int64)
    return AttentionMetadata(torch.from_numpy(written).to(device), tuple(chunks))


def _segments(row: int, position: int, count: int, slots: Int64) -> Iterator[_Segment]:
    """Cuts at multiples of SEGMENT_TOKENS in the sequence, so that no segment reaches into a second tile."""
    while count > 0:
        size = min(SEGMENT_TOKENS - position % SEGMENT_TOKENS, count)
        yield _Segment(row, position, size, slots)
        row, position, count = row + size, position + size, count - size


def _chunks(segments: list[_Segment], tokens: int, null_slot: int, device: torch.device) -> list[AttentionChunk]:
    """Whole segments, those with most tiles first, as many as fit in MAX_PAIRS, at least one a chunk."""
    chunks: list[AttentionChunk] = []
    part: list[_Segment] = []
    pairs = 0
    for segment in sorted(segments, key=_num_tiles, reverse=True):
        tiles = _num_tiles(segment)
        if part and pairs + tiles > MAX_PAIRS:
            chunks.append(_chunk(part, tokens, null_slot, device))
            part, pairs = [], 0
        part.append(segment)
        pairs += tiles
    if part:
        chunks.append(_chunk(part, tokens, null_slot, device))
    return chunks


def _num_tiles(segment: _Segment) -> int:
    return -(-(segment.position + segment.count) // TILE_KEYS)


def _chunk(segments: list[_Segment], tokens: int, null_slot: int, device: torch.device) -> AttentionChunk:
    num_tiles = np.array([_num_tiles(segment) for segment in segments])
    first_pair = np.concatenate([[0], np.cumsum(num_tiles)[:-1]])
    num_pairs = int(num_tiles.sum())
    tile_sizes = [int((num_tiles > tile).sum()) for tile in range(num_tiles[0])]
    pair_segments = np.concatenate([np.arange(size) for size in tile_sizes])
    tile_of_pair = np.repeat(np.arange(len(tile_sizes)), tile_sizes)
    key_slots = np.full((num_pairs, TILE_KEYS), null_slot, dtype=np.int64)
    query_rows = np.empty((len(segments), tokens), dtype=np.int64)
    positions = np.zeros((len(segments), tokens), dtype=np.int64)
    for index, segment in enumerate(segments):
        end = segment.position + segment.count
        start = first_pair[index]
        key_slots[start : start + num_tiles[index]].reshape(-1)[:end] = segment.slots[:end]
        query_rows[index] = segment.row
        query_rows[index, : segment.count] = np.arange(segment.row, segment.row + segment.count)
        # Padding asks what the last query asks, so it sees a key in every tile, like all others.
        positions[index] = end - 1
        positions[index, : segment.count] = np.arange(segment.position, end)
    key_positions = tile_of_pair[:, None] * TILE_KEYS + np.arange(TILE_KEYS)
    masked = key_positions[:, None, :] > positions[pair_segments][:, :, None]
    bias = np.where(masked, np.float32(-np.inf), np.float32(0))
    counts = np.array([segment.count for segment in segments])
    real = np.arange(tokens)[None, :] < counts[:, None]
    output_rows = np.flatnonzero(real)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return AttentionChunk(
        query_rows=tensor(query_rows.reshape(-1)),
        output_rows=tensor(output_rows),
        target_rows=tensor(query_rows.reshape(-1)[output_rows]),
        pair_segments=tensor(pair_segments),
        key_slots=tensor(key_slots[first_pair[pair_segments] + tile_of_pair].reshape(-1)),
        bias=tensor(bias),
        tile_sizes=tuple(tile_sizes),
        segment_tokens=tokens,
        whole=False,
    )
