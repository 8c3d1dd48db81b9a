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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (50, 33), (576, 1536)])
def test_rows_alone_and_together(kind: type[Linear], outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    linear = make_linear(OPS["cpu" if kind is PackedLinear else "cpu-plain"], RowProver(), weight, bias)
    assert isinstance(linear, kind)
    x = torch.randn(700, inputs)
    whole = linear(x)
    torch.testing.assert_close(whole, reference.linear(x, weight, bias), rtol=1e-4, atol=1e-3)
    for start, rows in ((0, 1), (699, 1), (5, 2), (13, 3), (100, 17), (31, 33), (64, 130), (7, 531)):
        assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows]), (start, rows)
    with one_thread():
        assert torch.equal(linear(x[40:51]), whole[40:51])
    assert linear(x[:0]).shape == (0, outputs)


class Moody(Linear):
    """A library whose result depends on the row count: exact for counts in `good`, off by a little otherwise."""

    def __init__(self, weight: torch.Tensor, good: set[int]) -> None:
        super().__init__(RowPlan(()), None)
        self.weight, self.good, self.seen = weight, good, set[int]()

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(x.shape[0])
        y = torch.stack([(self.weight * row).sum(-1) for row in x])
        return y if x.shape[0] in self.good else y * 1.0000002


def test_the_prover_rejects_row_counts_that_change_bits() -> None:
    torch.manual_seed(1)
    linear = Moody(torch.randn(20, 30), {2, 8, 16, 128})
    linear.plan = RowProver().plan(linear, 30, torch.float32)
    assert linear.plan.proven == (2, 8, 16, 128)
    linear.seen.clear()
    x = torch.randn(151, 30)
    whole = linear(x)
    assert all(torch.equal(linear(x[i : i + 1])[0], whole[i]) for i in range(0, 151, 10))
    assert linear.seen <= {2, 8, 16, 128}


def test_the_prover_works_once_a_shape() -> None:
    prover = RowProver()
    first, second = (make_linear(OPS["cpu"], prover, torch.randn(24, 24), None) for _ in range(2))
    assert first.plan is second.plan
    assert prover.thread_independent
