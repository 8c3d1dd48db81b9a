"""Paged attention in plain torch: a query's result depends on its own keys and values and on nothing else.

A query reduces over its keys in tiles of `TILE_KEYS`, anchored at position 0 of its sequence and independent of the
block size; the tiles' partial results are merged in order (Dao et al., FlashAttention, 2022: the running maximum and
sum). Keys and values are read as stored in the cache, also those of the same step. Where a tile reaches beyond the
sequence the index points at a row of zeros that nobody writes, so whatever stale memory holds cannot be read at all.

Each matrix product has one fixed shape: `rows` queries by `TILE_KEYS` keys. Single-token queries may use fewer rows
where start-up proved that this gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE_KEYS = 128
# Tokens of one sequence that are multiplied together; fewer are padded.
SEGMENT_TOKENS = 16
_PROOF_BATCHES = (1, 2, 3, 5, 16, 96)


@dataclass(frozen=True)
class AttentionChunk:
    """Some segments of a step: up to `segment_tokens` queries each, and the key tiles that they read.

    S segments, P pairs of a segment and a key tile (segment by segment, tiles in order), Q tokens in a segment.
    """

    query_rows: torch.Tensor  # [S * Q] int64, rows of the step's tokens; padding repeats a row
    output_rows: torch.Tensor  # [num_queries] int64, where in [S * Q] the real queries stand
    target_rows: torch.Tensor  # [num_queries] int64, the step's rows that they are
    pair_segments: torch.Tensor  # [P] int64
    key_slots: torch.Tensor  # [P * TILE_KEYS] int64, rows of the cache
    masked: torch.Tensor  # [P, Q, TILE_KEYS] bool, True where a query must not see a key
    tile_pairs: tuple[torch.Tensor, ...]  # for tile t: [S] int64, the pair of each segment, P where it has none
    segment_tokens: int


def attention(
    query: torch.Tensor, cache: torch.Tensor, chunks: Sequence[AttentionChunk], num_kv_heads: int, single_rows: int
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim], cache [num_slots + 1, 2 * num_kv_heads * head_dim] -> like query.

    The last row of the cache is all zeros. `single_rows` is the row count for chunks of single tokens.
    """
    output = torch.empty_like(query)
    for chunk in chunks:
        result = _attend(query, cache, chunk, num_kv_heads, single_rows)
        output.index_copy_(0, chunk.target_rows, result.index_select(0, chunk.output_rows))
    return output


def _attend(
    query: torch.Tensor, cache: torch.Tensor, chunk: AttentionChunk, num_kv_heads: int, single_rows: int
) -> torch.Tensor:
    """The chunk's queries, padding included: [S * Q, num_heads, head_dim]."""
    num_heads, head_dim = query.shape[1:]
    group = num_heads // num_kv_heads
    tokens = chunk.segment_tokens
    rows = tokens * group
    segments = chunk.query_rows.shape[0] // tokens
    pairs = chunk.pair_segments.shape[0]
    # [S * Q, heads, D] -> [kv_heads, S, Q * group, D]: the queries that share a key head are the rows of one product.
    q = query.index_select(0, chunk.query_rows).float()
    q = q.view(segments, tokens, num_kv_heads, group, head_dim).permute(2, 0, 1, 3, 4)
    q = q.reshape(num_kv_heads, segments, rows, head_dim).mul_(head_dim**-0.5)
    masked = chunk.masked.repeat_interleave(group, 1) if group > 1 else chunk.masked
    wanted = single_rows if tokens == 1 else rows
    if wanted > rows:
        q = torch.nn.functional.pad(q, (0, 0, 0, wanted - rows))
        masked = torch.nn.functional.pad(masked, (0, 0, 0, wanted - rows))
    stored = cache.index_select(0, chunk.key_slots).view(pairs, TILE_KEYS, 2 * num_kv_heads, head_dim)
    kv = torch.empty(2 * num_kv_heads, pairs, TILE_KEYS, head_dim, dtype=torch.float32, device=cache.device)
    kv.copy_(stored.permute(2, 0, 1, 3))
    flat = kv.view(2, num_kv_heads * pairs, TILE_KEYS, head_dim)
    if pairs > segments:
        q = q.index_select(1, chunk.pair_segments)
    scores = torch.bmm(q.reshape(-1, wanted, head_dim), flat[0].transpose(1, 2))
    scores = scores.view(num_kv_heads, pairs, wanted, TILE_KEYS).masked_fill_(masked, -torch.inf)
    highest = scores.amax(-1)
    # A tile that a query must not see at all has no maximum: its weights become exact zeros.
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = scores.sub_(shift.unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    values = torch.bmm(weights.view(-1, wanted, TILE_KEYS), flat[1])
    values = values.view(num_kv_heads, pairs, wanted, head_dim)
    if pairs > segments:
        total, values = _merge(highest, total, values, chunk.tile_pairs)
    result = values.div_(total.unsqueeze(-1))[:, :, :rows]
    result = result.view(num_kv_heads, segments, tokens, group, head_dim).permute(1, 2, 0, 3, 4)
    return result.reshape(segments * tokens, num_heads, head_dim).to(query.dtype)


def _merge(
    highest: torch.Tensor, total: torch.Tensor, values: torch.Tensor, tile_pairs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results [kv_heads, P, ..] to whole ones [kv_heads, S, ..], tile by tile in order of position.

    A segment without a t-th tile adds exact zeros there, so longer neighbours do not change it.
    """
    pad = torch.nn.functional.pad
    highest = pad(highest, (0, 0, 0, 1), value=-torch.inf)
    total = pad(total, (0, 0, 0, 1))
    values = pad(values, (0, 0, 0, 0, 0, 1))
    tiles = [highest.index_select(1, pairs) for pairs in tile_pairs]
    best = torch.stack(tiles).amax(0)
    merged_total = torch.zeros_like(best)
    merged_values = torch.zeros_like(values[:, : best.shape[1]])
    for tile, pairs in zip(tiles, tile_pairs, strict=True):
        scale = tile.sub(best).exp_()
        merged_total.add_(total.index_select(1, pairs).mul_(scale))
        merged_values.add_(values.index_select(1, pairs).mul_(scale.unsqueeze(-1)))
    return merged_total, merged_values


def prove_single_rows(group: int, head_dim: int) -> int:
    """Rows for single-token queries: the fewest that give a full segment's bits here, else a full segment's rows.

    Trial products of both shapes, in several batch sizes, with every row at every place of its group.
    """
    full = SEGMENT_TOKENS * group
    generator = torch.Generator().manual_seed(head_dim)
    for rows in (-(-group // 4) * 4, -(-group // 8) * 8, -(-group // 16) * 16):
        if rows < full and all(_same_bits(rows, full, batch, head_dim, generator) for batch in _PROOF_BATCHES):
            return rows
    return full


def _same_bits(rows: int, full: int, batch: int, head_dim: int, generator: torch.Generator) -> bool:
    few = torch.randn(batch, rows, head_dim, generator=generator)
    many = few.repeat(1, -(-full // rows), 1)[:, :full].contiguous()
    kv = torch.randn(2 * batch, TILE_KEYS, head_dim, generator=generator)
    scores, all_scores = (torch.bmm(x, kv[:batch].transpose(1, 2)) for x in (few, many))
    values, all_values = (torch.bmm(x, kv[batch:]) for x in (scores, all_scores))
    alone = torch.bmm(many[:1], kv[:1].transpose(1, 2))
    return torch.equal(alone, all_scores[:1]) and all(
        torch.equal(everywhere[:, place : place + rows], one[:, : full - place])
        for one, everywhere in ((scores, all_scores), (values, all_values))
        for place in range(0, full, rows)
    )
