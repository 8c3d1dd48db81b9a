"""best_indices against a full stable sort."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.sampling.ranking import best_indices


@given(
    st.lists(st.sampled_from([0.0, -0.5, 1.0, 3.0, 7.5, -20.0, -np.inf]), min_size=1, max_size=120),
    st.integers(0, 130),
    st.sampled_from([np.float32, np.float64]),
)
@settings(deadline=None, max_examples=200)
def test_ties_go_to_the_lowest_index(values: list[float], count: int, dtype: type) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert best_indices(np.array(values, dtype=dtype), count).tolist() == expected


def test_a_vocabulary() -> None:
    values = np.random.default_rng(0).standard_normal(49152).astype(np.float32) * 3
    order = np.argsort(-values, kind="stable")
    for count in (1, 5, 20, 50, 1000, 20_000, 49_151, 49_152, 10**7):
        assert np.array_equal(best_indices(values, count), order[:count])
