"""Paged attention against the oracle, and its bits: any batch, chunking, tile implementation with proof."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evensong.kernels import reference
from evensong.kernels.attention import (
    SEGMENT_TOKENS,
    TILE_KEYS,
    AttentionPlan,
    attention,
    fused_tiles,
    plain_tiles,
    prove_attention,
)
from evensong.kernels.linear import one_thread
from evensong.layers.attention.metadata import build_attention_metadata

CPU = torch.device("cpu")
BLOCK_SIZE = 8
SHAPES = [(9, 3, 64), (4, 4, 16), (7, 1, 32), (2, 1, 8), (1, 1, 80)]
DTYPES = [torch.float32, torch.bfloat16]


class Cache:
    """Random keys and values of a few sequences in scattered blocks; everything else is NaN.

    All are bfloat16 numbers, kept in `dtype`.
    """

    def __init__(self, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> None:
        heads, kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(sum(lengths))
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        order = np.random.default_rng(0).permutation(sum(blocks) + 3)
        ends = np.cumsum(blocks)
        self.tables = [order[end - count : end].astype(np.int64) for count, end in zip(blocks, ends, strict=True)]
        self.num_slots = len(order) * BLOCK_SIZE
        self.rows = torch.full((self.num_slots + 1, 2 * kv_heads * head_dim), torch.nan, dtype=dtype)
        self.rows[-1] = 0
        self.queries, self.keys, self.values = [], [], []
        for length, table in zip(lengths, self.tables, strict=True):
            kv = torch.randn(length, 2, kv_heads, head_dim, generator=generator).bfloat16().to(dtype)
            positions = np.arange(length)
            self.rows[table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE] = kv.view(length, -1)
            self.keys.append(kv[:, 0])
            self.values.append(kv[:, 1])
            queries = torch.randn(length, heads, head_dim, generator=generator) * 2
            self.queries.append(queries.bfloat16().to(dtype))
        self.kv_heads = kv_heads

    def attend(
        self, work: list[tuple[int, int, int]], plan: AttentionPlan, window: int | None = None
    ) -> list[torch.Tensor]:
        """Results for (sequence, first position, count), computed together."""
        counts = [count for _, _, count in work]
        tables = [self.tables[index][None] for index, _, _ in work]
        (metadata,) = build_attention_metadata(
            counts, [start for _, start, _ in work], tables, BLOCK_SIZE, self.num_slots, CPU, window
        )
        query = torch.cat([self.queries[index][start : start + count] for index, start, count in work])
        scale = query.shape[-1] ** -0.5
        return list(attention(query, self.rows, metadata.chunks, self.kv_heads, plan, scale).split(counts))


def plan_for(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> AttentionPlan:
    return prove_attention(shape[0] // shape[1], shape[2], dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_oracle(shape: tuple[int, int, int]) -> None:
    lengths = [1, 7, TILE_KEYS, TILE_KEYS + 1, 300]
    cache = Cache(lengths, shape)
    for plan in (plan_for(shape), AttentionPlan(shape[0] // shape[1], plain_tiles)):
        results = cache.attend([(i, 0, length) for i, length in enumerate(lengths)], plan)
        for index, result in enumerate(results):
            for position in {0, len(result) // 2, len(result) - 1}:
                expected = reference.attention(
                    cache.queries[index][position],
                    cache.keys[index][: position + 1],
                    cache.values[index][: position + 1],
                )
                torch.testing.assert_close(result[position], expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_rounds_weights_and_results_alone() -> None:
    """Scores and sums stay float32: the error is that of a few roundings, not of sums in bfloat16."""
    shape, lengths = (9, 3, 64), [TILE_KEYS, 700]
    exact = Cache(lengths, shape).attend([(0, 0, TILE_KEYS), (1, 0, 700)], plan_for(shape))
    plan = plan_for(shape, torch.bfloat16)
    rounded = Cache(lengths, shape, torch.bfloat16).attend([(0, 0, TILE_KEYS), (1, 0, 700)], plan)
    for one, other in zip(exact, rounded, strict=True):
        torch.testing.assert_close(other.float(), one, rtol=2e-2, atol=8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_by_one_and_together(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [300, 140, 33, 128]
    cache, plan = Cache(lengths, shape, dtype), plan_for(shape, dtype)
    whole = [cache.attend([(i, 0, length)], plan)[0] for i, length in enumerate(lengths)]
    rng = np.random.default_rng(1)
    for _ in range(25):
        work = []
        for index in rng.permutation(4)[: rng.integers(1, 5)]:
            start = int(rng.integers(0, lengths[index]))
            count = int(rng.choice([1, 1, 2, 20, lengths[index]]))
            work.append((int(index), start, min(count, lengths[index] - start)))
        for (index, start, count), result in zip(work, cache.attend(work, plan), strict=True):
            assert torch.equal(result, whole[index][start : start + count]), work
    with one_thread():
        assert torch.equal(cache.attend([(0, 250, 1)], plan)[0], whole[0][250:251])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [1, 5, 16, 100, 128, 200])
def test_a_window_against_the_oracle(shape: tuple[int, int, int], window: int) -> None:
    cache = Cache([400], shape)
    for plan in (plan_for(shape), AttentionPlan(shape[0] // shape[1], plain_tiles)):
        (result,) = cache.attend([(0, 0, 400)], plan, window)
        for position in (0, window - 1, window, 130, 255, 256, 399):
            seen = slice(max(position - window + 1, 0), position + 1)
            expected = reference.attention(cache.queries[0][position], cache.keys[0][seen], cache.values[0][seen])
            torch.testing.assert_close(result[position], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 40, 128, 150])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 1, 256)])
def test_a_window_one_by_one_together_and_after_its_past_is_gone(
    shape: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    """Segments whose queries begin to see in different tiles; tiles visited for the sake of others; freed memory."""
    lengths = [420, 300]
    cache, plan = Cache(lengths, shape, dtype), plan_for(shape, dtype)
    whole = [cache.attend([(i, 0, length)], plan, window)[0] for i, length in enumerate(lengths)]
    assert all(result.isfinite().all() for result in whole)
    rng = np.random.default_rng(window)
    for _ in range(25):
        work = []
        for index in rng.permutation(2)[: rng.integers(1, 3)]:
            start = int(rng.integers(0, lengths[index]))
            count = int(rng.choice([1, 1, 2, 20, lengths[index]]))
            work.append((int(index), start, min(count, lengths[index] - start)))
        for (index, start, count), result in zip(work, cache.attend(work, plan, window), strict=True):
            assert torch.equal(result, whole[index][start : start + count]), work
    for start in (130, 256, 390):
        passed = max(start - window + 1, 0) // BLOCK_SIZE
        for block in cache.tables[0][:passed][cache.tables[0][:passed] >= 0]:
            cache.rows[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = torch.nan
        cache.tables[0][:passed] = -1
        for count in (1, 420 - start):
            assert torch.equal(cache.attend([(0, start, count)], plan, window)[0], whole[0][start : start + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_decode_step(dtype: torch.dtype) -> None:
    shape = (9, 3, 64)
    lengths = [100 + 3 * i for i in range(60)]
    cache, plan = Cache(lengths, shape, dtype), plan_for(shape, dtype)
    together = cache.attend([(i, length - 1, 1) for i, length in enumerate(lengths)], plan)
    for index in range(0, 60, 7):
        assert torch.equal(cache.attend([(index, lengths[index] - 1, 1)], plan)[0], together[index])


def test_scores_of_any_size_stay_finite() -> None:
    shape = (4, 2, 16)
    cache = Cache([200], shape)
    cache.queries[0] *= 1e4
    result = cache.attend([(0, 0, 200)], plan_for(shape))[0]
    assert result.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_needs_proof(dtype: torch.dtype) -> None:
    """The plan's short rows give a full segment's bits; where none do, full segments are used."""
    plan = prove_attention(3, 64, dtype)
    assert plan.single_rows <= SEGMENT_TOKENS * 3 and plan.tiles in (fused_tiles, plain_tiles)
    assert plan.single_rows >= 3
