"""Filters against a reference that sorts everything in Python; extreme settings give the mathematically right set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling import filters
from evensong.sampling.row import Candidates


def kept(logits: list[float], **params: float) -> list[int]:
    row = np.array(logits, dtype=np.float32)
    settings_ = SamplingParams(**params)  # type: ignore[arg-type]
    candidates = filters.scale(settings_, row)
    for step in filters.ORDER:
        step(settings_, candidates)
    assert np.isfinite(candidates.scores).all() and (np.diff(candidates.ids) > 0).all()
    return candidates.ids.tolist()


def reference(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[list[int], bool]:
    """The kept ids; False when a threshold lies so close that rounding may decide."""
    values = [float(np.float32(x)) for x in logits]
    best = max(values)
    scores = {i: (x - best) / temperature for i, x in enumerate(values) if x > -math.inf}
    scores = {i: s for i, s in scores.items() if s > -64}
    clear = True
    if min_p > 0:
        clear &= all(abs(s - math.log(min_p)) > 1e-9 for s in scores.values())
        scores = {i: s for i, s in scores.items() if s >= math.log(min_p)}
    order = sorted(scores, key=lambda i: (-scores[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = [math.exp(scores[i]) for i in order]
        wanted = top_p * math.fsum(weights)
        count = 0
        while count < len(order) and (count == 0 or math.fsum(weights[:count]) < wanted):
            count += 1
            clear &= abs(math.fsum(weights[:count]) - wanted) > 1e-9 * wanted
        order = order[:count]
    return sorted(order), clear


LOGITS = st.lists(
    st.one_of(
        st.floats(-30, 30, width=32),
        st.sampled_from([0.0, 1.0, 2.0, -math.inf]),
    ),
    min_size=1,
    max_size=80,
)


@given(
    LOGITS,
    st.sampled_from([0.05, 0.5, 1.0, 1.7, 20.0]),
    st.sampled_from([0.0, 0.02, 0.3, 0.9]),
    st.sampled_from([0, 1, 2, 5, 1000]),
    st.sampled_from([1e-4, 0.1, 0.5001, 0.9, 0.99999, 1.0]),
)
@settings(deadline=None, max_examples=250)
def test_filters_agree_with_the_reference(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    assume(max(logits) > -math.inf)
    expected, clear = reference(logits, temperature, min_p, top_k, top_p)
    assume(clear)
    result = kept(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    far = [i for i in result if (logits[i] - max(logits)) / temperature < -63]
    assert [i for i in result if i not in far] == [i for i in expected if i not in far]


@pytest.mark.parametrize("spread", [0.5, 2.5, 8.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_the_nucleus_of_a_vocabulary_is_the_smallest_set(spread: float, top_p: float) -> None:
    logits = (np.random.default_rng(4).standard_normal(20_000) * spread).astype(np.float32)
    ids = kept(logits.tolist(), top_p=top_p)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    inside = np.sort(weights[ids])
    outside = np.delete(weights, ids)
    assert inside[0] >= outside.max()
    assert math.fsum(inside) >= top_p * math.fsum(weights) * (1 - 1e-12)
    assert math.fsum(inside[1:]) < top_p * math.fsum(weights) * (1 + 1e-12)


def test_ties_at_the_edge_go_to_the_lowest_ids() -> None:
    assert kept([1.0] * 4, top_p=0.5) == [0, 1]
    assert kept([1.0] * 4, top_p=0.51) == [0, 1, 2]
    assert kept([0.0, 1.0, 1.0, 1.0, 0.0], top_k=2) == [1, 2]
    assert kept([0.0, 5.0, 0.0, 0.0], top_k=3) == [0, 1, 2]
    assert kept([1.0] * 3000, top_p=0.9) == list(range(2700))


def test_extreme_settings() -> None:
    logits = [0.1, 0.3, 0.2, 0.29999]
    assert kept(logits, temperature=1e-12) == [1]
    assert kept(logits, temperature=5e-324) == [1]
    assert kept(logits, top_p=1e-4) == [1]
    assert kept(logits, top_p=5e-324) == [1]
    assert kept(logits, top_k=10**7) == [0, 1, 2, 3]
    assert kept(logits, top_k=-1) == [0, 1, 2, 3]
    assert kept(logits, temperature=1e9) == [0, 1, 2, 3]
    assert kept([3e38, -3e38, 0.0, -math.inf], temperature=1e9) == [0]
    assert kept([0.0, -math.inf, 1.0], temperature=1e9) == [0, 2]
    assert kept([-3e38, -math.inf, -3e38], temperature=1e9) == [0, 2]
    assert kept(logits, min_p=1.0) == [1]
    assert kept([1.0, 1.0, 0.5], min_p=1.0) == [0, 1]
    assert kept([0.0, 1.0], top_p=math.nextafter(1.0, 0.0)) == [0, 1]


def test_a_tiny_temperature_keeps_exact_ties_only() -> None:
    near = float(np.nextafter(np.float32(7.0), np.float32(0.0)))
    assert kept([7.0, near, 7.0], temperature=1e-12) == [0, 2]
    # Near the spacing of float32 neighbours differ by a finite score.
    assert kept([7.0, near, 7.0], temperature=1e-6) == [0, 1, 2]


def test_scores_are_relative_to_the_best_and_scaled() -> None:
    candidates = filters.scale(SamplingParams(temperature=0.5), np.array([1.0, 3.0, -np.inf, 2.0], dtype=np.float32))
    assert candidates.ids.tolist() == [0, 1, 3]
    assert candidates.scores.tolist() == [-4.0, 0.0, -2.0]
    assert isinstance(candidates, Candidates)
