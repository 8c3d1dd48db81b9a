"""Raw logprobs against torch's log-softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evensong.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("size, spread", [(5, 1.0), (272, 4.0), (49152, 2.5), (49152, 12.0)])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_values_ids_and_rank(size: int, spread: float, count: int) -> None:
    logits = (np.random.default_rng(size).standard_normal(size) * spread).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    order = np.argsort(-logits, kind="stable")
    for token_id in (int(order[0]), int(order[size // 2]), size - 1):
        result = token_logprobs(logits, token_id, count)
        assert result.token_ids == [token_id, *order[:count].tolist()]
        assert result.logprobs == pytest.approx(expected[result.token_ids].tolist(), rel=1e-6, abs=1e-5)
        assert result.rank == 1 + int((logits > logits[token_id]).sum())


def test_more_than_there_are() -> None:
    logits = np.array([1.0, -np.inf, 2.0], dtype=np.float32)
    result = token_logprobs(logits, 0, 20)
    # A forbidden token has no log-probability to report.
    assert result.token_ids == [0, 2, 0]
    assert result.rank == 2
    assert np.exp(result.logprobs[1:]).sum() == pytest.approx(1.0)


def test_equal_logits_share_a_rank_and_stand_in_order_of_id() -> None:
    result = token_logprobs(np.array([0.0, 3.0, 3.0, 3.0], dtype=np.float32), 3, 2)
    assert (result.token_ids, result.rank) == ([3, 1, 2], 1)


def test_huge_logits_do_not_overflow() -> None:
    result = token_logprobs(np.array([3e38, -3e38, 0.0], dtype=np.float32), 0, 3)
    assert result.logprobs[0] == 0.0 and not np.isnan(result.logprobs).any()


def test_values_are_plain_numbers_of_float32_precision() -> None:
    result = token_logprobs(np.array([0.3, 0.1], dtype=np.float32), 1, 2)
    assert all(type(value) is float and value == float(np.float32(value)) for value in result.logprobs)
    assert all(type(token_id) is int for token_id in result.token_ids)


def test_tokens_that_were_asked_for_come_last() -> None:
    logits = np.array([0.0, 3.0, 1.0, -np.inf, 2.0], dtype=np.float32)
    result = token_logprobs(logits, 4, 1, asked=[2, 3])
    assert (result.token_ids, result.num_asked, result.rank) == ([4, 1, 2, 3], 2, 2)
    assert result.logprobs[:3] == token_logprobs(logits, 4, 3).logprobs[:2] + [token_logprobs(logits, 2, 0).logprobs[0]]
    assert result.logprobs[3] < -1e38
