"""The table holds an op set for each device; the numeric mode says what a run computes in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evensong.kernels.dispatch import OPS, describe_kernels, make_linear, ops_for
from evensong.kernels.linear import AnyRows, PlainLinear, RowProver
from evensong.kernels.mode import BFLOAT16, FLOAT32, NumericMode, numeric_mode

CPU = torch.device("cpu")


def test_one_op_set_a_device() -> None:
    assert ops_for(CPU) in (OPS["cpu"], OPS["cpu-plain"])
    assert ops_for(CPU).invariant
    assert not ops_for(torch.device("cuda")).invariant


def test_no_proof_where_no_promise_is_made() -> None:
    linear = make_linear(OPS["cuda"], RowProver(), torch.randn(8, 8), None)
    assert isinstance(linear, PlainLinear) and isinstance(linear.plan, AnyRows)


@pytest.mark.parametrize("multiplies", [False, True])
def test_numeric_modes(multiplies: bool) -> None:
    def mode(dtype: str, device: str = "cpu") -> NumericMode:
        return numeric_mode(dtype, device, multiplies_bfloat16=multiplies or device == "cuda")

    run = mode("bfloat16")
    assert run.stored == run.kv == "bfloat16"
    assert run.compute == ("bfloat16" if multiplies else "float32")
    assert mode("float16") == run
    half = mode("float16", "cuda")
    assert half.stored == half.compute == half.kv == "float16" and half.name == "float16"
    exact = mode("float32")
    assert exact.stored == exact.compute == exact.kv == "float32"
    assert len({run.name, exact.name, mode("bfloat16", "cuda").name}) == 3 - multiplies


def test_another_cache_keeps_the_rest() -> None:
    assert BFLOAT16.with_kv("auto") == BFLOAT16.with_kv("bfloat16") == BFLOAT16
    wide = BFLOAT16.with_kv("float32")
    assert (wide.kv, wide.compute, wide.stored) == ("float32", "bfloat16", "bfloat16")


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
def test_values_are_rounded_as_torch_does(value: float) -> None:
    assert BFLOAT16.rounded(value) == float(torch.tensor(value).to(torch.bfloat16))
    assert FLOAT32.rounded(value) == value


def test_kernels_are_described_in_text() -> None:
    parts = describe_kernels(CPU)
    assert parts["deterministic"] == "yes" and parts["kernel_build"].startswith("torch 2.")
    assert all(type(value) is str for value in parts.values())
