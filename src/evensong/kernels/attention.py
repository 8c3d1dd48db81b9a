"""Paged attention in plain torch: a query's result depends on its own keys and values and on nothing else.

A query reduces over its keys in tiles of `TILE_KEYS`, anchored at position 0 of its sequence and independent of the
block size; the tiles' partial results are merged in order, weighted by their log-sum-exp (Dao et al., FlashAttention,
2022). Keys and values are read as stored in the cache, also those of the same step. Where a tile reaches beyond the
sequence, or before its window, the index points at a row of zeros that nobody writes, so whatever stale memory holds
cannot be read at all.

A layer with a window leaves out the tiles before it. Queries that are computed together may begin to see in different
tiles: one that sees nothing in a tile takes exactly nothing from it, so visiting the tile or not gives the same result.

Each matrix product has one fixed shape: a segment's query rows by `TILE_KEYS` keys. Single-token queries may use fewer
rows, and the library's fused kernel may compute the tiles, where start-up proved that this keeps the bits
(`prove_attention`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from evensong.kernels.linear import bits_of, one_thread

TILE_KEYS = 128
# Tokens of one sequence that are multiplied together; fewer are padded. Divides TILE_KEYS.
SEGMENT_TOKENS = 16
_PROOF_BATCHES = (1, 3, 16)
_PROOF_HEADS = 2

# (q [P, kv_heads, rows, D], k and v [P, kv_heads, TILE_KEYS, D], float32 bias [P, 1, rows, TILE_KEYS], scale) to
# (attended values [P, kv_heads, rows, D] in the dtype of q, float32 log-sum-exp of the scores [P, kv_heads, rows]).
TileAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


@dataclass(frozen=True)
class AttentionChunk:
    """Some segments of a step: up to `segment_tokens` queries each, and the key tiles that they read.

    S segments, those with most tiles first; P pairs of a segment and a key tile: all first tiles, then the second ones
    of the segments that have one, and so on; Q tokens in a segment. A segment's queries stand in one tile, so without a
    window each of them sees a key in every tile that it is paired with; `blind` names those that do not.
    """

    query_rows: torch.Tensor  # [S * Q] int64, rows of the step's tokens; padding repeats a row
    output_rows: torch.Tensor  # [num_queries] int64, where in [S * Q] the real queries stand
    target_rows: torch.Tensor  # [num_queries] int64, the step's rows that they are
    pair_segments: torch.Tensor  # [P] int64
    key_slots: torch.Tensor  # [P * TILE_KEYS] int64, rows of the cache
    bias: torch.Tensor  # [P, Q, TILE_KEYS] float32, -inf where a query must not see a key, else 0
    blind: torch.Tensor | None  # [P, Q] bool, queries that see nothing in the tile; None where all see something
    tile_sizes: tuple[int, ...]  # for tile t: the number of segments that have one, so S at first; together P
    segment_tokens: int
    whole: bool  # the queries are the step's tokens, all of them, in order


@dataclass(frozen=True)
class AttentionPlan:
    """How this machine computes attention: rows for chunks of single tokens, what computes a tile, in which dtype.

    A tile's sums are kept in float32 in either dtype; bfloat16 rounds its weights and its result. `result` are the bits
    that a trial tile gave, where there was one.
    """

    single_rows: int
    tiles: TileAttention
    dtype: torch.dtype = torch.float32
    result: bytes = b""


def attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    chunks: Sequence[AttentionChunk],
    num_kv_heads: int,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim], cache [num_slots + 1, 2 * num_kv_heads * head_dim] -> like query.

    The last row of the cache is all zeros. `scale` multiplies the scores.
    """
    if len(chunks) == 1 and chunks[0].whole:
        return _attend(query, cache, chunks[0], num_kv_heads, plan, scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for chunk in chunks:
        result = _attend(query.index_select(0, chunk.query_rows), cache, chunk, num_kv_heads, plan, scale)
        if result.shape[0] > chunk.output_rows.shape[0]:
            result = result.index_select(0, chunk.output_rows)
        output.index_copy_(0, chunk.target_rows, result)
    return output


def _attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    chunk: AttentionChunk,
    num_kv_heads: int,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """The chunk's queries, padding included: [S * Q, num_heads, head_dim], to the same shape."""
    num_heads, head_dim = query.shape[1:]
    group = num_heads // num_kv_heads
    tokens = chunk.segment_tokens
    rows = tokens * group
    segments, pairs = query.shape[0] // tokens, chunk.pair_segments.shape[0]
    # The queries that share a key head are the rows of one product: token by token, heads of the group inside.
    q = query.to(plan.dtype).view(segments, tokens, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(segments, num_kv_heads, rows, head_dim)
    bias = chunk.bias.unsqueeze(1)
    if tokens > 1:
        bias = bias.repeat_interleave(group, 2)
    elif plan.single_rows > rows:
        q = q.index_select(2, _repeated(rows, plan.single_rows))
    if pairs > segments:
        q = q.index_select(0, chunk.pair_segments)
    stored = cache.index_select(0, chunk.key_slots).to(plan.dtype)
    kv = stored.view(pairs, TILE_KEYS, 2, num_kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    values, lse = plan.tiles(q, kv[0], kv[1], bias.expand(-1, 1, q.shape[2], TILE_KEYS), scale)
    if pairs > segments:
        values = values.float()
        if chunk.blind is not None:
            blind = chunk.blind.repeat_interleave(group, 1).unsqueeze(1)
            lse.masked_fill_(blind, -torch.inf)
            values.masked_fill_(blind.unsqueeze(-1), 0.0)
        values = _merge(values, lse, chunk)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    values = values[:, :, :rows].view(segments, num_kv_heads, tokens, group, head_dim).transpose(1, 2)
    output.view(segments, tokens, num_kv_heads, group, head_dim).copy_(values)
    return output


def _merge(values: torch.Tensor, lse: torch.Tensor, chunk: AttentionChunk) -> torch.Tensor:
    """Partial results [P, kv_heads, ..] to whole ones [S, kv_heads, ..], tile by tile in order of position."""
    ends = list(itertools.accumulate(chunk.tile_sizes))
    later = [(slice(end - size, end), size) for end, size in zip(ends[1:], chunk.tile_sizes[1:], strict=True)]
    best = lse[: ends[0]].clone()
    for place, size in later:
        torch.maximum(best[:size], lse[place], out=best[:size])
    weights = lse.sub(best.index_select(0, chunk.pair_segments)).exp_()
    values.mul_(weights.unsqueeze(-1))
    total, merged = weights[: ends[0]], values[: ends[0]]
    for place, size in later:
        total[:size].add_(weights[place])
        merged[:size].add_(values[place])
    return merged.div_(total.unsqueeze(-1))


@functools.cache
def _repeated(rows: int, count: int) -> torch.Tensor:
    """Indices that repeat 0..rows-1 up to `count`."""
    return torch.arange(count) % rows


def fused_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A TileAttention by torch's fused CPU kernel, which reads keys and values in place."""
    values, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    return values, lse


def plain_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A TileAttention by batched matrix products, on any device."""
    scores = torch.matmul(q * scale, k.transpose(2, 3).contiguous()).add_(bias)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1)
    values = torch.matmul(weights, v.contiguous()).div_(total.unsqueeze(-1))
    return values, total.log_().add_(highest.squeeze(-1))


def prove_attention(group: int, head_dim: int, dtype: torch.dtype) -> AttentionPlan:
    """The cheapest plan in `dtype` that keeps the bits of full segments on this CPU; no proof, no short rows.

    Trial tiles in several batch sizes, on one thread and on all, with every row at every place of its segment.
    """
    # Plain products would round the scores themselves to bfloat16, so they always compute in float32.
    for tiles, exactness in ((fused_tiles, dtype), (fused_tiles, torch.float32), (plain_tiles, torch.float32)):
        for multiple in (4, 8, 16):
            plan = AttentionPlan(-(-group // multiple) * multiple, tiles, exactness)
            result = _trial_bits(plan, group, head_dim) if plan.single_rows < SEGMENT_TOKENS * group else b""
            if result:
                return replace(plan, result=result)
    return AttentionPlan(SEGMENT_TOKENS * group, plain_tiles)


def _trial_bits(plan: AttentionPlan, group: int, head_dim: int) -> bytes:
    """The bits of trial tiles, if the plan's short rows give, one by one and all at once, what full segments give."""
    given = b""
    rows, tiles = plan.single_rows, plan.tiles
    full = SEGMENT_TOKENS * group
    generator = torch.Generator().manual_seed(head_dim)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(plan.dtype)

    for batch in _PROOF_BATCHES:
        # Each key comes twice, its value the second time with the other sign: where all are visible the attended values
        # are rounding errors alone, and tell the order of summation (as in linear.cancelling_operands).
        half = noise(batch, TILE_KEYS // 2, 2, _PROOF_HEADS, head_dim)
        again = half[:, torch.randperm(TILE_KEYS // 2, generator=generator)].clone()
        again[:, :, 1].neg_()
        kv = torch.cat([half, again], dim=1).permute(2, 0, 3, 1, 4)
        few = noise(batch, _PROOF_HEADS, rows, head_dim)
        many = few.repeat(1, 1, -(-full // rows), 1)[:, :, :full].contiguous()
        visible = TILE_KEYS - torch.arange(batch) * 41 % TILE_KEYS
        bias = torch.zeros(batch, 1, 1, TILE_KEYS)
        bias.masked_fill_(torch.arange(TILE_KEYS) >= visible.view(-1, 1, 1, 1), -torch.inf)
        expected = tiles(few, kv[0], kv[1], bias.expand(-1, 1, rows, -1), 0.125)
        with one_thread():
            results = [tiles(few, kv[0], kv[1], bias.expand(-1, 1, rows, -1), 0.125)]
        wide = tiles(many, kv[0], kv[1], bias.expand(-1, 1, full, -1), 0.125)
        for place in range(0, full, rows):
            results.append((wide[0][:, :, place : place + rows], wide[1][:, :, place : place + rows]))
        for result in results:
            size = result[0].shape[2]
            if not all(torch.equal(r, e[:, :, :size]) for r, e in zip(result, expected, strict=True)):
                return b""
        last = slice(batch - 1, batch)
        alone = tiles(few[last], kv[0][last], kv[1][last], bias[last].expand(-1, 1, rows, -1), 0.125)
        if not all(torch.equal(a, e[last]) for a, e in zip(alone, expected, strict=True)):
            return b""
        given += bits_of(expected[0])
    return given
