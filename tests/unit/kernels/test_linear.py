"""Row plans cover any count with proven sizes; products do not depend on the rows beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evensong.kernels import reference
from evensong.kernels.dispatch import OPS, make_linear
from evensong.kernels.linear import (
    TILE_ROWS,
    AnyRows,
    Linear,
    PackedLinear,
    PlainLinear,
    RowPlan,
    RowProver,
    cancelling_operands,
    one_thread,
)

KINDS = [PackedLinear, PlainLinear]


@given(proven=st.sets(st.integers(1, 600), max_size=8), rows=st.integers(0, 2000))
def test_pieces_cover_the_rows_with_proven_sizes(proven: set[int], rows: int) -> None:
    plan = RowPlan(tuple(proven))
    pieces = plan.pieces(rows)
    assert set(pieces) <= proven | {TILE_ROWS}
    assert sum(pieces) >= rows
    assert sum(pieces[:-1]) < rows or not pieces
    assert rows in plan.proven and pieces == (rows,) or sum(pieces) - rows < max(TILE_ROWS, max(proven, default=0))


def test_without_proof_only_tiles() -> None:
    assert RowPlan(()).pieces(40) == (16, 16, 16)
    assert AnyRows().pieces(40) == (40,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (50, 33), (576, 1536), (1000, 4096)])
def test_rows_alone_and_together(kind: type[Linear], outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, dtype=dtype), torch.randn(outputs, dtype=dtype)
    linear = make_linear(OPS["cpu" if kind is PackedLinear else "cpu-plain"], RowProver(), weight, bias)
    assert isinstance(linear, kind)
    x = torch.randn(700, inputs, dtype=dtype)
    whole = linear(x)
    exact = reference.linear(x.float(), weight.float(), bias.float())
    tolerance = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (1e-2, 1.0)}[dtype]
    torch.testing.assert_close(whole.float(), exact, rtol=tolerance[0], atol=tolerance[1])
    for start, rows in ((0, 1), (699, 1), (5, 2), (13, 3), (100, 17), (31, 33), (64, 130), (7, 531)):
        assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows]), (start, rows)
    assert torch.equal(torch.cat([linear(row) for row in x.split(1)]), whole)
    with one_thread():
        assert torch.equal(linear(x[40:51]), whole[40:51])
    assert linear(x[:0]).shape == (0, outputs)


class Moody(Linear):
    """A library that sums in another order unless the row count is in `good`."""

    good: frozenset[int] = frozenset()

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, plan: RowPlan) -> None:
        super().__init__(plan, bias)
        self.weight, self.seen = weight, set[int]()

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(x.shape[0])
        terms = x.float()[:, None] * self.weight.float()
        order = range(x.shape[1]) if x.shape[0] in self.good else reversed(range(x.shape[1]))
        total = torch.zeros(terms.shape[:2])
        for index in order:
            total += terms[:, :, index]
        return total.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prover_rejects_row_counts_that_change_bits(dtype: torch.dtype) -> None:
    """Also where a bfloat16 result would round the difference away in all but one of some thousand sums."""

    class Moody28(Moody):
        good = frozenset({2, 8, 16, 128})

    torch.manual_seed(1)
    weight = torch.randn(20, 30, dtype=dtype)
    linear = Moody28(weight, None, RowProver().plan(Moody28, weight))
    assert linear.plan.proven == (2, 8, 16, 128)
    x = torch.randn(151, 30, dtype=dtype)
    whole = linear(x)
    assert all(torch.equal(linear(x[i : i + 1])[0], whole[i]) for i in range(0, 151, 10))
    assert linear.seen <= {2, 8, 16, 128}


def test_another_order_of_summation_is_another_machine() -> None:
    class Forwards(Moody):
        good = frozenset(range(1, 600))

    class Backwards(Moody):
        good = frozenset()

    results = []
    for kind in (Forwards, Forwards, Backwards):
        prover = RowProver()
        assert len(prover.plan(kind, torch.randn(20, 30)).proven) > 20
        results.append(prover.results)
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(("outputs", "inputs"), [(20, 30), (300, 33), (5, 1)])
def test_trial_sums_are_zero_but_for_rounding(outputs: int, inputs: int) -> None:
    weight, rows = cancelling_operands(outputs, inputs, torch.bfloat16)
    assert weight.shape == (outputs, inputs) and rows.shape == (TILE_ROWS, inputs)
    assert torch.equal(rows.double() @ weight.double().T, torch.zeros(TILE_ROWS, outputs, dtype=torch.double))


def test_the_prover_works_once_a_shape() -> None:
    prover = RowProver()
    first, second = (make_linear(OPS["cpu"], prover, torch.randn(24, 24), None) for _ in range(2))
    assert first.plan is second.plan
