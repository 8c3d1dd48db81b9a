"""Row ops against the oracle, and each row's bits alone, among others, and on other thread counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from evensong.kernels import reference, torch_ops
from evensong.kernels.linear import one_thread

SLICES = ((0, 1), (299, 1), (3, 2), (17, 5), (64, 41), (1, 299))


def assert_rows_independent(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    whole = op(x)
    for start, rows in SLICES:
        part = op(x[start : start + rows].clone())
        assert torch.equal(part, whole[start : start + rows]), (start, rows)
        with one_thread():
            assert torch.equal(op(x[start : start + rows].clone()), part)


@pytest.mark.parametrize("hidden", [33, 576, 1000])
def test_rms_norm(hidden: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, hidden), torch.randn(hidden)
    torch.testing.assert_close(torch_ops.rms_norm(x, weight, 1e-5, torch.float32), reference.rms_norm(x, weight, 1e-5))
    assert_rows_independent(lambda rows: torch_ops.rms_norm(rows, weight, 1e-5, torch.float32), x)
    rounded = torch_ops.rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert torch.equal(rounded, torch_ops.rms_norm(x, weight, 1e-5, torch.float32).bfloat16())


@pytest.mark.parametrize("width", [50, 64, 1536, 33024])
def test_silu_mul(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 2 * width) if width < 2000 else torch.randn(300, 2 * width, dtype=torch.bfloat16).float()
    torch.testing.assert_close(torch_ops.silu_mul(x[:20]), reference.silu_mul(x[:20]))
    assert_rows_independent(torch_ops.silu_mul, x)


@pytest.mark.parametrize("width", [50, 64, 2048])
def test_gelu_tanh_mul(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 2 * width) * 3
    torch.testing.assert_close(torch_ops.gelu_tanh_mul(x), reference.gelu_tanh_mul(x), rtol=1e-4, atol=1e-6)
    assert_rows_independent(torch_ops.gelu_tanh_mul, x)
    gate = torch.tensor([[-1e30, -1e4, 0.0, 1e4, 1e30]])
    assert torch_ops.gelu_tanh_mul(torch.cat([gate, torch.ones(1, 5)], 1)).tolist() == [[0, 0, 0, 1e4, gate[0, 4]]]


def test_silu_of_large_values() -> None:
    for width in (50, 64):
        gate = torch.tensor([-1e4, -100.0, 100.0, 1e4] + [0.0] * (width - 4))
        y = torch_ops.silu_mul(torch.cat([gate, torch.ones(width)]).unsqueeze(0))[0]
        assert y[:4].tolist() == [0.0, pytest.approx(0.0, abs=1e-30), 100.0, 1e4]


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("width", [64, 192, 1536, 32768])
def test_splits_fall_between_vectors(threads: int, width: int) -> None:
    for rows in (1, 2, 21, 22, 44, 100, 513, 2000):
        bounds = torch_ops.whole_vector_splits(rows, width, threads)
        assert bounds[0] == 0 and bounds[-1] == rows and bounds == sorted(set(bounds))
        for start, stop in zip(bounds, bounds[1:], strict=False):
            elements = (stop - start) * width
            used = min(threads, -(-elements // 32768))
            assert used == 1 or -(-elements // used) % 64 == 0, (rows, start, stop)


def test_rotary() -> None:
    torch.manual_seed(0)
    heads, positions = torch.randn(300, 5, 16), torch.randint(0, 4000, (300,))
    half = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = (positions.double().unsqueeze(-1) * half).float()
    cos = torch.cat([angle.cos(), angle.cos()], -1).unsqueeze(1)
    sin = torch.cat([-angle.sin(), angle.sin()], -1).unsqueeze(1)
    rotated = heads.clone()
    torch_ops.rotary(rotated, cos, sin)
    torch.testing.assert_close(rotated, reference.rotary(heads, positions, 10000.0), rtol=1e-3, atol=1e-3)
    for start, rows in SLICES:
        part = heads[start : start + rows].clone()
        torch_ops.rotary(part, cos[start : start + rows], sin[start : start + rows])
        assert torch.equal(part, rotated[start : start + rows])


def test_embedding_and_cache_rows() -> None:
    table = torch.randn(10, 4).bfloat16()
    rows = torch_ops.embedding(torch.tensor([3, 3, 9]), table, torch.float32)
    assert rows.dtype == torch.float32 and torch.equal(rows, table[[3, 3, 9]].float())
    cache = torch.full((6, 4), torch.nan, dtype=torch.bfloat16)
    torch_ops.write_kv(cache, torch.tensor([4, 1]), torch.arange(8.0).view(2, 4))
    assert cache[4].tolist() == [0, 1, 2, 3] and cache[1].tolist() == [4, 5, 6, 7]
    assert cache[[0, 2, 3, 5]].isnan().all()
