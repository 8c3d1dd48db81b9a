"""The native attention kernels: right against float64, and the same bits however the queries are cut and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from evensong import _native

Array = np.ndarray[Any, Any]
Span = tuple[int, int, int, Array]

# "widened": a bfloat16 cache in a float32 computation.
MODES = [
    (isa, mode)
    for isa in _native.supported_isas()
    for mode in ("bfloat16", "float32", "widened")
    if mode != "bfloat16" or isa == "avx512_bf16"
]
# heads, kv heads, head_dim: groups 1, 3, 7 and 8
SHAPES = [(3, 3, 64), (9, 3, 64), (7, 1, 80), (8, 1, 128), (6, 2, 256), (14, 2, 18)]
REFERENCES: dict[tuple[Any, ...], Array] = {}
each_mode = pytest.mark.parametrize(("isa", "mode"), MODES)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def round_bf16(x: Array) -> Array:
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def widen(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


@dataclass
class World:
    """One sequence: queries [length, heads * head_dim], keys and values [length, 2 * kv_heads * head_dim]."""

    isa: str
    mode: str
    shape: tuple[int, int, int]
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        heads, kv_heads, dim = self.shape
        rng = np.random.default_rng(self.seed)
        query = rng.standard_normal((self.length, heads * dim), np.float32)
        kv = rng.standard_normal((self.length, 2 * kv_heads * dim), np.float32)
        self.query = round_bf16(query) if self.mode == "bfloat16" else query
        self.kv = kv if self.mode == "float32" else round_bf16(kv)

    def store(self, block_size: int, fill: float = 0.0) -> tuple[Array, Array]:
        """(cache, block table): the sequence in scattered blocks of a cache that is otherwise full of `fill`."""
        count = -(-self.length // block_size)
        table = np.random.default_rng(block_size).permutation(2 * count)[:count].astype(np.int32)
        filled = np.full((2 * count * block_size, self.kv.shape[1]), fill, np.float32)
        cache = filled if self.mode == "float32" else round_bf16(filled)
        dtype = "float32" if self.mode == "float32" else "bfloat16"
        places = _native.cache_places(block_size, *self.shape[1:], self.isa, dtype)
        positions = np.arange(self.length)
        blocks = cache.reshape(2 * count, -1)
        blocks[table[positions // block_size, None], places[positions % block_size]] = self.kv
        return cache, table

    def run(
        self,
        cuts: Sequence[int],
        block_size: int = 16,
        stored: tuple[Array, Array] | None = None,
        **options: Any,
    ) -> Array:
        """Results of queries cuts[0]..cuts[-1], handed in as spans between neighbouring cuts."""
        cache, table = stored or self.store(block_size)
        first = cuts[0]
        spans: list[Span] = [(a - first, b - a, a, table) for a, b in zip(cuts, cuts[1:], strict=False)]
        scale = self.shape[2] ** -0.5
        query = self.query[first : cuts[-1]]
        return _native.attention(query, cache, spans, *self.shape, block_size, scale, self.isa, **options)

    def reference(self, begin: int, end: int, window: int = 0, soft_cap: float = 0.0) -> Array:
        """Results of queries begin..end in float64; the same for all instruction sets, so computed once."""
        key = (self.mode, self.shape, self.length, begin, end, window, soft_cap)
        if key not in REFERENCES:
            REFERENCES[key] = self.compute_reference(begin, end, window, soft_cap)
        return REFERENCES[key]

    def compute_reference(self, begin: int, end: int, window: int, soft_cap: float) -> Array:
        heads, kv_heads, dim = self.shape
        query = widen(self.query).astype(np.float64).reshape(-1, kv_heads, heads // kv_heads, dim)
        kv = widen(self.kv).astype(np.float64).reshape(-1, 2, kv_heads, dim)
        out = np.zeros((end - begin, heads * dim))
        for p in range(begin, end):
            seen = kv[max(0, p - window + 1) if window else 0 : p + 1]
            scores = np.einsum("hgd,khd->hgk", query[p], seen[:, 0]) * dim**-0.5
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[p - begin] = np.einsum("hgk,khd->hgd", weights, seen[:, 1]).ravel()
        return out


def same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@each_mode
@each_shape
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (1, 0.0), (40, 0.0), (150, 5.0)])
def test_close_to_float64(isa: str, mode: str, shape: tuple[int, int, int], window: int, soft_cap: float) -> None:
    world = World(isa, mode, shape, 330)
    options = {"window": window, "soft_cap": soft_cap}
    expected = world.reference(0, 330, **options)
    result = widen(world.run([0, 1, 33, 120, 330], **options))
    if mode == "bfloat16":
        # Half a unit in the last place of a weight and of the result, 2^-9 of the largest value in each.
        assert np.abs(result - expected).max() < 2**-8 * np.abs(widen(world.kv)).max()
    else:
        assert np.abs(result - expected).max() < 5e-6


@each_mode
@each_shape
@pytest.mark.parametrize("window", [0, 70])
def test_spans_of_any_size_give_the_same_bits(isa: str, mode: str, shape: tuple[int, int, int], window: int) -> None:
    world = World(isa, mode, shape, 300)
    whole = world.run([0, 300], window=window)
    assert same(whole, world.run(range(301), window=window))
    assert same(whole, world.run(range(0, 301, 5), window=window))
    assert same(whole, world.run([0, *range(11, 300, 32), 300], window=window))
    assert same(whole[250:], world.run([250, 251, 300], window=window))


@each_mode
@pytest.mark.parametrize("window", [0, 200])
def test_block_size_and_place_do_not_matter(isa: str, mode: str, window: int) -> None:
    world = World(isa, mode, (6, 2, 64), 530)
    whole = world.run([0, 530], window=window)
    for block_size in (1, 5, 24, 32, 48, 512):
        assert same(whole, world.run([0, 400, 529, 530], block_size, window=window))


@each_mode
@each_shape
def test_rope_writes_what_attention_reads(isa: str, mode: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    world = World(isa, mode, shape, 150)
    qkv = np.concatenate([widen(world.query), widen(world.kv)], axis=1)
    still = np.ones((150, dim // 2), np.float32), np.zeros((150, dim // 2), np.float32)
    positions = np.arange(150)
    expected = world.run([0, 150], 1)
    for block_size in (1, 5, 16, 24, 32, 48, 512):
        cache, table = world.store(block_size, fill=np.nan)
        slots = table[positions // block_size] * np.int64(block_size) + positions % block_size
        cache[:] = np.nan if mode == "float32" else 0x7FC0
        query_dtype = "bfloat16" if mode == "bfloat16" else "float32"
        query = _native.rope(qkv, positions, slots, *still, cache, *shape, block_size, isa, query_dtype)
        assert same(query, world.query)
        assert same(expected, world.run([0, 80, 149, 150], block_size, (cache, table)))


@each_mode
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (1000, 5.0), (1300, 0.0)])
def test_splits_give_the_same_bits(isa: str, mode: str, window: int, soft_cap: float) -> None:
    world = World(isa, mode, (3, 1, 64), 3100)
    options = {"window": window, "soft_cap": soft_cap}
    for cuts in ([3099, 3100], [2030, 2070], [1020, 1025, 1030], [0, 20]):
        whole = world.run(cuts, **options)
        assert same(whole, world.run(cuts, splits=True, **options))
        expected = world.reference(cuts[0], cuts[-1], **options)
        assert np.abs(widen(whole) - expected).max() < (2e-2 if mode == "bfloat16" else 5e-6)
    assert same(world.run([2030, 2070], **options), world.run(range(2030, 2071), **options))


@each_mode
@pytest.mark.parametrize("fill", [np.nan, np.inf])
@pytest.mark.parametrize("window", [0, 50])
def test_memory_that_is_not_the_sequences_is_not_read(isa: str, mode: str, fill: float, window: int) -> None:
    world = World(isa, mode, (3, 1, 80), 201)
    for cuts in ([0, 201], [200, 201], [190, 195]):
        clean = world.run(cuts, window=window)
        assert np.isfinite(widen(clean)).all()
        assert same(clean, world.run(cuts, stored=world.store(16, fill), window=window))


@each_mode
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("part", [slice(0, 80), slice(80, 160), slice(121, 122)], ids=str)
@pytest.mark.parametrize("window", [0, 12])
def test_a_later_or_forgotten_key_changes_nothing(isa: str, mode: str, value: float, part: slice, window: int) -> None:
    """Position 110 holds a key or value, or a component of one, that is not finite."""
    world = World(isa, mode, (3, 1, 80), 201)
    clean = world.run([90, 130], window=window)
    bad = np.full(1, value, np.float32)
    world.kv[110, part] = bad if mode == "float32" else round_bf16(bad) if np.isinf(value) else np.uint16(0x7FC0)
    result = world.run([90, 130], window=window)
    sees = np.array([p >= 110 and not (window and p - window + 1 > 110) for p in range(90, 130)])
    assert same(result[~sees], clean[~sees])
    assert (result[sees] != clean[sees]).any(1).all()
    if np.isnan(value):
        assert np.isnan(widen(result[sees])).any(1).all()
    alone = world.run(range(90, 131), window=window)
    assert same(result[~sees], alone[~sees])
    np.testing.assert_array_equal(widen(result), widen(alone))


@each_mode
@pytest.mark.parametrize("splits", [False, True])
def test_blocks_before_the_window_are_not_read(isa: str, mode: str, splits: bool) -> None:
    world = World(isa, mode, (3, 1, 64), 1400)
    cache, table = world.store(16)
    for begin in (1390, 1100, 200):
        cuts = [begin, begin + 9]
        expected = world.run(cuts, window=100, stored=(cache, table))
        forgotten = table.copy()
        forgotten[: (begin - 99) // 16] = -1
        assert same(expected, world.run(cuts, window=100, stored=(cache, forgotten), splits=splits))
        forgotten[(begin - 99) // 16] = -1
        with pytest.raises(ValueError, match="block"):
            world.run(cuts, window=100, stored=(cache, forgotten))


@each_mode
def test_other_sequences_do_not_matter(isa: str, mode: str) -> None:
    worlds = [World(isa, mode, (9, 3, 64), length, seed) for seed, length in enumerate((150, 1, 40))]
    stored = [world.store(16) for world in worlds]
    cache = np.concatenate([cache for cache, _ in stored])
    query = np.concatenate([world.query for world in worlds])
    spans, row, slot = [], 0, 0
    for world, (own, table) in zip(worlds, stored, strict=True):
        spans.append((row, world.length, 0, table + np.int32(slot // 16)))
        row, slot = row + world.length, slot + len(own)
    result = _native.attention(query, cache, spans[::-1], 9, 3, 64, 16, 64**-0.5, isa)
    assert same(result, np.concatenate([world.run([0, world.length]) for world in worlds]))


@each_mode
def test_extreme_scores(isa: str, mode: str) -> None:
    """A far larger score takes all the weight, wherever it stands."""
    world = World(isa, mode, (1, 1, 64), 300)
    for position in (0, 127, 128, 299):
        kv = np.zeros((300, 128), np.float32)
        kv[:, 64:] = np.arange(300)[:, None] % 7
        kv[:, :64] = -1e4
        kv[position, :64] = 1e4
        world.kv = kv if mode == "float32" else round_bf16(kv)
        world.query = np.ones_like(world.query) if mode != "bfloat16" else np.full_like(world.query, 0x3F80)
        assert (widen(world.run([299, 300])) == position % 7).all()


def test_bad_arguments_are_refused() -> None:
    isa = _native.supported_isas()[0]
    query, cache = np.zeros((4, 128), np.float32), np.zeros((64, 128), np.float32)
    table = np.arange(4, dtype=np.int32)

    def run(**changes: Any) -> None:
        arguments = {
            "query": query,
            "cache": cache,
            "spans": [(0, 4, 10, table)],
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
            "block_size": 16,
            "scale": 1.0,
            "isa": isa,
        }
        _native.attention(**(arguments | changes))

    run()
    for changes in (
        {"isa": "none"},
        {"head_dim": 63},
        {"head_dim": 32},
        {"num_heads": 3, "num_kv_heads": 2},
        {"num_kv_heads": 0},
        {"block_size": 0},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"window": -1},
        {"soft_cap": -1.0},
        {"query": query[:, :64].copy()},
        {"query": query.astype(np.float64)},
        {"cache": cache.astype(np.float64)},
        {"query": query.astype(np.uint16)},  # a float32 cache
        {"cache": cache[:, :64].copy()},
        {"cache": cache[:10].copy()},
        {"cache": cache[:15].copy()},  # keys are visible up to position 13, but blocks are whole
        {"spans": [(1, 4, 10, table)]},
        {"spans": [(-1, 2, 10, table)]},
        {"spans": [(0, 0, 10, table)]},
        {"spans": [(0, 4, -1, table)]},
        {"spans": [(0, 4, 61, table)]},
        {"spans": [(0, 4, 10, np.full(4, -1, np.int32))]},
        {"spans": [(0, 4, 10, np.full(4, 4, np.int32))]},
    ):
        with pytest.raises(ValueError, match=r"."):
            run(**changes)


@pytest.mark.parametrize("isa", [isa for isa in _native.supported_isas() if isa != "avx512_bf16"])
def test_bfloat16_products_need_the_instructions(isa: str) -> None:
    world = World(isa, "bfloat16", (1, 1, 64), 4)
    with pytest.raises(ValueError, match="bfloat16"):
        world.run([0, 4])
