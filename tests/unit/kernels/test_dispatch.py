"""The table holds an op set for each device; the numeric mode says what a run computes in."""

from __future__ import annotations

import pytest
import torch

from evensong.kernels import mode
from evensong.kernels.dispatch import OPS, make_linear, ops_for
from evensong.kernels.linear import AnyRows, PlainLinear, RowProver

CPU = torch.device("cpu")


def test_one_op_set_a_device() -> None:
    assert ops_for(CPU) in (OPS["cpu"], OPS["cpu-plain"])
    assert ops_for(CPU).invariant
    assert not ops_for(torch.device("cuda")).invariant


def test_no_proof_where_no_promise_is_made() -> None:
    linear = make_linear(OPS["cuda"], RowProver(), torch.randn(8, 8), None)
    assert isinstance(linear, PlainLinear) and isinstance(linear.plan, AnyRows)


@pytest.mark.parametrize("multiplies", [False, True])
def test_numeric_modes(multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "cpu_multiplies_bfloat16", lambda: multiplies)
    run = mode.numeric_mode("bfloat16", CPU)
    assert run.stored == run.kv == torch.bfloat16
    assert run.compute == (torch.bfloat16 if multiplies else torch.float32)
    assert mode.numeric_mode("float16", CPU) == run
    half = mode.numeric_mode("float16", torch.device("cuda"))
    assert half.stored == half.compute == half.kv == torch.float16 and half.name == "float16"
    exact = mode.numeric_mode("float32", CPU)
    assert exact.stored == exact.compute == exact.kv == torch.float32
    assert len({run.name, exact.name, mode.numeric_mode("bfloat16", torch.device("cuda")).name}) == 3 - multiplies


def test_kernels_are_described_in_text() -> None:
    parts = mode.describe_kernels(CPU)
    assert parts["deterministic"] == "yes" and parts["torch"].startswith("2.")
    assert all(type(value) is str for value in parts.values())
