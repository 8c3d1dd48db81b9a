"""exp: an element's bits depend on its value alone, wherever it stands and however long the row is."""

from __future__ import annotations

import numpy as np
import pytest

from evensong.sampling.elementwise import exp


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_place_gives_the_same_bits(dtype: type) -> None:
    rng = np.random.default_rng(1)
    values = (-np.abs(rng.standard_normal(67)) * 10).astype(dtype)
    expected = np.array([exp(values[i : i + 1])[0] for i in range(len(values))])
    for start in range(20):
        for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 40):
            assert np.array_equal(exp(values[start : start + length]), expected[start : start + length])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [16383, 16384, 16385, 49152, 50001, 131073])
def test_long_rows_are_their_parts(dtype: type, size: int) -> None:
    values = (-np.abs(np.random.default_rng(2).standard_normal(size)) * 10).astype(dtype)
    whole = exp(values)
    parts = np.concatenate([exp(part) for part in np.array_split(values, 41)])
    assert np.array_equal(whole, parts)
    assert np.allclose(whole, np.exp(values), rtol=1e-6 if dtype is np.float32 else 1e-14, atol=0)


def test_the_edges() -> None:
    values = np.array([0.0, -0.0, -745.0, -1e9, -np.inf])
    assert exp(values).tolist() == [1.0, 1.0, 5e-324, 0.0, 0.0]
    assert exp(np.empty(0)).tolist() == []


def test_a_strided_row_is_read_as_it_is() -> None:
    values = np.random.default_rng(3).standard_normal(100)[::3]
    assert np.array_equal(exp(values), exp(values.copy()))
