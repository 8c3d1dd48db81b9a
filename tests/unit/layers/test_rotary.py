"""The rotary table against the oracle, and its independence of the length it was made for."""

from __future__ import annotations

import torch

from evensong.kernels import reference, torch_ops
from evensong.layers.torch_step import RotaryTables
from evensong.sources.model_description import Rope

CPU = torch.device("cpu")


def table_of(size: int, theta: float, length: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rope = Rope(theta)
    return RotaryTables(size, [rope], length, CPU).at(positions, torch.float32)[rope]


def test_table_rotates_as_the_oracle() -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 3000, (50,))
    heads = torch.randn(50, 3, 64)
    rotated = heads.clone()
    torch_ops.rotary(rotated, *table_of(64, 100000.0, 3000, positions))
    torch.testing.assert_close(rotated, reference.rotary(heads, positions, 100000.0), rtol=1e-3, atol=1e-3)
    norms = heads.norm(dim=-1)
    torch.testing.assert_close(rotated.norm(dim=-1), norms)


def test_position_zero_changes_nothing() -> None:
    heads = torch.randn(1, 2, 8)
    rotated = heads.clone()
    torch_ops.rotary(rotated, *table_of(8, 10000.0, 4, torch.tensor([0])))
    assert torch.equal(rotated, heads)


def test_entries_do_not_depend_on_the_tables_length() -> None:
    positions = torch.arange(37)
    short, long = (table_of(64, 10000.0, length, positions) for length in (37, 8192))
    for ours, theirs in zip(short, long, strict=True):
        assert torch.equal(ours, theirs)
