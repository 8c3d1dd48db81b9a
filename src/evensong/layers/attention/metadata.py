"""AttentionMetadata: where a step's tokens write and read keys and values; built once a step, shared by many layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evensong.kernels.attention import SEGMENT_TOKENS, TILE_KEYS, AttentionChunk

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]

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
    """Queries of one sequence: their first row and position, how many, and the first position that one of them sees.

    `slots` [num_groups, ..] are the sequence's cache rows from position `slots_from` on.
    """

    row: int
    position: int
    count: int
    first_seen: int
    slots: Int64
    slots_from: int

    @property
    def first_tile(self) -> int:
        """The tile of the first key that is seen."""
        return self.first_seen // TILE_KEYS

    @property
    def num_tiles(self) -> int:
        """Tiles from there to the last query's own."""
        return -(-(self.position + self.count) // TILE_KEYS) - self.first_tile


def build_attention_metadata(
    num_query_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_tables: Sequence[Int32],
    block_size: int,
    num_slots: int,
    device: torch.device,
    window: int | None = None,
) -> list[AttentionMetadata]:
    """From one entry a request, in row order; block_tables [num_groups, num_blocks] -> one metadata a group.

    A query sees `window` positions, its own included, or all up to its own. Row `num_slots` of the cache is the row of
    zeros. Table entries of blocks that lie before the window of a request's first query are not read.
    """
    write_slots: list[Int64] = []
    single: list[_Segment] = []
    several: list[_Segment] = []
    row = 0
    for count, computed, blocks in zip(num_query_tokens, num_computed_tokens, block_tables, strict=True):
        first_block = _first_seen(computed, window) // block_size
        slots_from = first_block * block_size
        used = blocks[:, first_block : -(-(computed + count) // block_size), None]
        slots = (used.astype(np.int64) * block_size + np.arange(block_size)).reshape(len(blocks), -1)
        write_slots.append(slots[:, computed - slots_from : computed + count - slots_from])
        if count == 1:
            single.append(_Segment(row, computed, 1, _first_seen(computed, window), slots, slots_from))
        else:
            several.extend(_segments(row, computed, count, window, slots, slots_from))
        row += count
    num_groups = len(block_tables[0]) if block_tables else 1
    written = np.concatenate(write_slots, axis=1) if write_slots else np.empty((1, 0), dtype=np.int64)
    chunks: list[list[AttentionChunk]] = [[] for _ in range(num_groups)]
    for segments, tokens in ((single, 1), (several, SEGMENT_TOKENS)):
        for part in _parts(segments):
            for group, chunk in enumerate(_chunk(part, tokens, window, num_groups, num_slots, device)):
                chunks[group].append(chunk)
    if len(chunks[0]) == 1 and not several and bool((chunks[0][0].query_rows.diff() > 0).all()):
        chunks = [[replace(chunk, whole=True)] for (chunk,) in chunks]
    return [
        AttentionMetadata(torch.from_numpy(rows).to(device), tuple(of_group))
        for rows, of_group in zip(written, chunks, strict=True)
    ]


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(position - window + 1, 0)


def _segments(
    row: int, position: int, count: int, window: int | None, slots: Int64, slots_from: int
) -> Iterator[_Segment]:
    """Cuts at multiples of SEGMENT_TOKENS in the sequence, so that no segment's queries stand in two tiles."""
    while count > 0:
        size = min(SEGMENT_TOKENS - position % SEGMENT_TOKENS, count)
        yield _Segment(row, position, size, _first_seen(position, window), slots, slots_from)
        row, position, count = row + size, position + size, count - size


def _parts(segments: list[_Segment]) -> Iterator[list[_Segment]]:
    """Whole segments, those with most tiles first, as many as fit in MAX_PAIRS, at least one a part."""
    part: list[_Segment] = []
    pairs = 0
    for segment in sorted(segments, key=lambda one: one.num_tiles, reverse=True):
        tiles = segment.num_tiles
        if part and pairs + tiles > MAX_PAIRS:
            yield part
            part, pairs = [], 0
        part.append(segment)
        pairs += tiles
    if part:
        yield part


def _chunk(
    segments: list[_Segment],
    tokens: int,
    window: int | None,
    num_groups: int,
    null_slot: int,
    device: torch.device,
) -> list[AttentionChunk]:
    """One chunk a group: they differ in their key slots alone."""
    num_tiles = np.array([segment.num_tiles for segment in segments])
    first_pair = np.concatenate([[0], np.cumsum(num_tiles)[:-1]])
    num_pairs = int(num_tiles.sum())
    tile_sizes = [int((num_tiles > tile).sum()) for tile in range(num_tiles[0])]
    pair_segments = np.concatenate([np.arange(size) for size in tile_sizes])
    tile_of_pair = np.repeat(np.arange(len(tile_sizes)), tile_sizes)
    key_slots = np.full((num_groups, num_pairs * TILE_KEYS), null_slot, dtype=np.int64)
    query_rows = np.empty((len(segments), tokens), dtype=np.int64)
    positions = np.zeros((len(segments), tokens), dtype=np.int64)
    for index, segment in enumerate(segments):
        end = segment.position + segment.count
        # What is seen by no query of the segment keeps the row of zeros.
        place = (int(first_pair[index]) - segment.first_tile) * TILE_KEYS
        seen = segment.slots[:, segment.first_seen - segment.slots_from : end - segment.slots_from]
        key_slots[:, place + segment.first_seen : place + end] = seen
        query_rows[index] = segment.row
        query_rows[index, : segment.count] = np.arange(segment.row, segment.row + segment.count)
        # Padding asks what the last query asks, so it sees a key where that one does.
        positions[index] = end - 1
        positions[index, : segment.count] = np.arange(segment.position, end)
    first_tiles = np.array([segment.first_tile for segment in segments])
    tile_starts = (tile_of_pair + first_tiles[pair_segments]) * TILE_KEYS
    bias, blind = _bias(tile_starts, positions[pair_segments], window)
    counts = np.array([segment.count for segment in segments])
    real = np.arange(tokens)[None, :] < counts[:, None]
    output_rows = np.flatnonzero(real)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    chunk = AttentionChunk(
        query_rows=tensor(query_rows.reshape(-1)),
        output_rows=tensor(output_rows),
        target_rows=tensor(query_rows.reshape(-1)[output_rows]),
        pair_segments=tensor(pair_segments),
        key_slots=torch.empty(0),
        bias=tensor(bias),
        blind=None if blind is None else tensor(blind),
        tile_sizes=tuple(tile_sizes),
        segment_tokens=tokens,
        whole=False,
    )
    order = first_pair[pair_segments] + tile_of_pair
    ordered = key_slots.reshape(num_groups, num_pairs, TILE_KEYS)[:, order].reshape(num_groups, -1)
    return [replace(chunk, key_slots=tensor(slots)) for slots in ordered]


def _bias(tile_starts: Int64, positions: Int64, window: int | None) -> tuple[Any, Any]:
    """The bias of each pair's queries at `positions` [P, Q], and which of them see nothing there, if any do.

    Those read the tile as if it were visible, so that their results are numbers, which the merge then leaves out.
    """
    keys = tile_starts[:, None, None] + np.arange(TILE_KEYS)
    masked = keys > positions[:, :, None]
    blind = None
    if window is not None:
        masked |= keys <= positions[:, :, None] - window
        blind = masked.all(-1)
        masked[blind] = False
    bias = np.where(masked, np.float32(-np.inf), np.float32(0))
    return bias, blind if blind is not None and blind.any() else None
