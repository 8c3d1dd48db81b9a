"""The native kernels of single rows: norms and rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evensong import _native

Array = np.ndarray[Any, Any]

each_isa = pytest.mark.parametrize("isa", _native.supported_isas())
SIZES = (1, 7, 16, 64, 65, 576, 1000, 2048)


def round_bf16(x: Array) -> Array:
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@each_isa
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_close_to_float64(isa: str, size: int) -> None:
    x, weight = noise(5, size) * 3, noise(size, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    result = _native.rms_norm(x, weight, 1e-5, isa, "float32")
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)
    assert (_native.rms_norm(x, weight, 1e-5, isa, "bfloat16") == round_bf16(result)).all()


@each_isa
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_of_a_row_depends_on_that_row_alone(isa: str, size: int) -> None:
    x, weight = noise(9, size), noise(size, seed=1)
    x[4] = np.nan
    for dtype in ("float32", "bfloat16"):
        whole = _native.rms_norm(x, weight, 1e-5, isa, dtype)
        for row in (0, 3, 5, 8):
            assert (_native.rms_norm(x[row : row + 1], weight, 1e-5, isa, dtype) == whole[row]).all()


@each_isa
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_adds_the_norm(isa: str, size: int) -> None:
    x, y, weight = noise(3, size), noise(3, size, seed=1), noise(size, seed=2)
    result = _native.add_rms_norm(x, y, weight, 1e-6, isa)
    assert (result == x + _native.rms_norm(y, weight, 1e-6, isa, "float32")).all()


class Rope:
    """Arguments of a call: 6 rows, 4 heads, 2 kv heads, 48 slots."""

    def __init__(self, head_dim: int, rotary_dim: int, cache_dtype: type, block_size: int = 1) -> None:
        self.head_dim, self.half, self.block_size = head_dim, rotary_dim // 2, block_size
        self.qkv = noise(6, 8 * head_dim)
        angles = np.outer(np.arange(50), 100.0 ** -(np.arange(self.half) / self.half))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.positions = np.array([0, 1, 49, 7, 7, 30], np.int64)
        self.slots = np.array([39, 0, 5, 6, 20, 11], np.int64)
        self.cache = np.full((48, 4 * head_dim), 7, cache_dtype)

    def run(self, isa: str, dtype: str = "float32", **options: Any) -> Array:
        tables = (self.positions, self.slots, self.cos, self.sin, self.cache)
        query = _native.rope(self.qkv, *tables, 4, 2, self.head_dim, self.block_size, isa, dtype, **options)
        assert isinstance(query, np.ndarray)
        return query

    def rows(self, isa: str) -> Array:
        """The cache as a row for each slot: the keys of all heads, then their values."""
        dtype = "float32" if self.cache.dtype == np.float32 else "bfloat16"
        places = _native.cache_places(self.block_size, 2, self.head_dim, isa, dtype)
        return self.cache.reshape(-1, places.size)[:, places].reshape(self.cache.shape)

    def expected(self, rows: slice = slice(None)) -> Array:
        """[rows, 8, head_dim] in float64."""
        heads = self.qkv[rows].astype(np.float64).reshape(-1, 8, self.head_dim).copy()
        cos, sin = self.cos[self.positions[rows], None], self.sin[self.positions[rows], None]
        first, second = heads[:, :6, : self.half].copy(), heads[:, :6, self.half : 2 * self.half].copy()
        heads[:, :6, : self.half] = first * cos - second * sin
        heads[:, :6, self.half : 2 * self.half] = second * cos + first * sin
        return heads


@each_isa
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (80, 32), (256, 256), (18, 18), (6, 2)])
def test_rope_close_to_float64(isa: str, head_dim: int, rotary_dim: int) -> None:
    rope = Rope(head_dim, rotary_dim, np.float32)
    query = rope.run(isa)
    expected = rope.expected()
    np.testing.assert_allclose(query, expected[:, :4].reshape(6, -1), rtol=0, atol=1e-6)
    np.testing.assert_allclose(rope.cache[rope.slots], expected[:, 4:].reshape(6, -1), rtol=0, atol=1e-6)
    assert (rope.cache[rope.slots, 2 * head_dim :] == rope.qkv[:, 6 * head_dim :]).all()
    assert (np.delete(rope.cache, rope.slots, axis=0) == 7).all()

    narrow = Rope(head_dim, rotary_dim, np.uint16)
    assert (narrow.run(isa, "bfloat16") == round_bf16(query)).all()
    assert (narrow.cache[rope.slots] == round_bf16(rope.cache[rope.slots])).all()


@each_isa
@pytest.mark.parametrize("block_size", [1, 3, 16, 24, 48])
@pytest.mark.parametrize("head_dim", [18, 64, 80, 256])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_blocks_of_any_size_hold_the_same_rows(isa: str, block_size: int, head_dim: int, dtype: type) -> None:
    rope, plain = Rope(head_dim, head_dim, dtype, block_size), Rope(head_dim, head_dim, dtype)
    for row in range(6):  # neighbouring tokens share words: each is written alone
        part = Rope(head_dim, head_dim, dtype, block_size)
        part.qkv, part.positions, part.slots = (x[row : row + 1] for x in (rope.qkv, rope.positions, rope.slots))
        part.cache = rope.cache
        part.run(isa)
    plain.run(isa)
    assert (rope.rows(isa) == plain.cache).all()


@each_isa
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (48, 80)])
def test_grouped_blocks_lie_as_documented(isa: str, block_size: int, head_dim: int) -> None:
    """cache_layout.h, in its own words."""
    for dtype, pairs in (("float32", False), ("bfloat16", isa == "avx512_bf16")):
        places = _native.cache_places(block_size, 2, head_dim, isa, dtype)
        block = np.empty(places.size, np.int64)
        block[places.ravel()] = np.arange(places.size)
        rows = np.arange(places.size).reshape(block_size // 16, 16, 2, 2, head_dim)  # group, token, K/V, head, d
        groups = block.reshape(2, block_size // 16, 2, 16 * head_dim)  # head, group, K/V
        keys, values = (groups[:, :, part] for part in (0, 1))
        expected = rows.transpose(2, 3, 0, 1, 4)  # K/V, head, group, token, d
        if pairs:
            keys = keys.reshape(2, -1, head_dim // 2, 16, 2).transpose(0, 1, 3, 2, 4).reshape(2, -1, 16, head_dim)
            values = values.reshape(2, -1, 8, head_dim, 2).transpose(0, 1, 2, 4, 3).reshape(2, -1, 16, head_dim)
        else:
            keys = keys.reshape(2, -1, head_dim, 16).transpose(0, 1, 3, 2)
            values = values.reshape(2, -1, 16, head_dim)
        assert (keys == expected[0]).all()
        assert (values == expected[1]).all()


@each_isa
def test_rope_norms_each_head_first(isa: str) -> None:
    rope = Rope(80, 80, np.float32)
    weights = noise(6, 80, seed=3)
    query = rope.run(isa, qk_norm=weights, eps=1e-6)
    plain = Rope(80, 80, np.float32)
    heads = plain.qkv.reshape(6, 8, 80)
    for head in range(6):
        rows = np.ascontiguousarray(heads[:, head])
        heads[:, head] = _native.rms_norm(rows, weights[head], 1e-6, isa, "float32")
    assert (plain.run(isa) == query).all()
    assert (plain.cache == rope.cache).all()


@each_isa
def test_rope_of_a_row_depends_on_that_row_alone(isa: str) -> None:
    rope = Rope(80, 80, np.uint16)
    rope.qkv[2] = np.nan
    whole = rope.run(isa, "bfloat16")
    alone = Rope(80, 80, np.uint16)
    alone.qkv, alone.positions, alone.slots = alone.qkv[3:4], alone.positions[3:4], alone.slots[3:4]
    assert (alone.run(isa, "bfloat16")[0] == whole[3]).all()
    assert (alone.cache[6] == rope.cache[6]).all()


def test_bad_arguments_are_refused() -> None:
    isa = _native.supported_isas()[0]
    x, weight = noise(2, 8), noise(8)
    for arguments in (
        (x, weight[:7], 1e-5, isa, "float32"),
        (x, weight, 1e-5, "none", "float32"),
        (x, weight, 1e-5, isa, "float16"),
        (noise(2, 0), noise(0), 1e-5, isa, "float32"),
    ):
        with pytest.raises(ValueError, match=r"."):
            _native.rms_norm(*arguments)
    with pytest.raises(ValueError, match="same shape"):
        _native.add_rms_norm(x, x[:1], weight, 1e-5, isa)
    with pytest.raises(ValueError, match="weight"):
        _native.add_rms_norm(x, x, weight[:7], 1e-5, isa)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qkv", noise(6, 8 * 64 - 1)),
        ("qkv", noise(5, 8 * 64)),
        ("positions", np.array([0, 1, 50, 7, 7, 30], np.int64)),
        ("positions", np.array([0, 1, -1, 7, 7, 30], np.int64)),
        ("slots", np.array([48, 0, 5, 6, 20, 11], np.int64)),
        ("slots", np.array([-1, 0, 5, 6, 20, 11], np.int64)),
        ("slots", np.arange(5)),
        ("cos", noise(50, 31)),
        ("cache", np.zeros((48, 100), np.float32)),
        ("cache", np.zeros((48, 4 * 64), np.float64)),
        ("block_size", 0),
        ("block_size", 32),
        ("head_dim", 63),
        ("head_dim", 258),
    ],
)
def test_bad_rope_arguments_are_refused(name: str, value: Any) -> None:
    isa = _native.supported_isas()[0]
    rope = Rope(64, 64, np.float32)
    rope.run(isa)
    setattr(rope, name, value)
    with pytest.raises(ValueError, match=r"."):
        rope.run(isa)
    with pytest.raises(ValueError, match="qk_norm"):
        Rope(64, 64, np.float32).run(isa, qk_norm=noise(5, 64))
