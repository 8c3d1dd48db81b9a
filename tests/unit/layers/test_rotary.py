"""The rotary table against the oracle, and its independence of the length it was made for."""

from __future__ import annotations

import torch

from evensong.kernels import reference, torch_ops
from evensong.layers.rotary import RotaryTable
from evensong.sources.model_description import Rope

CPU = torch.device("cpu")


def test_table_rotates_as_the_oracle() -> None:
    torch.manual_seed(0)
    table = RotaryTable(64, Rope(100000.0), 3000, CPU)
    positions = torch.randint(0, 3000, (50,))
    heads = torch.randn(50, 3, 64)
    rotated = heads.clone()
    torch_ops.rotary(rotated, *table.at(positions, torch.float32))
    torch.testing.assert_close(rotated, reference.rotary(heads, positions, 100000.0), rtol=1e-3, atol=1e-3)
    norms = heads.norm(dim=-1)
    torch.testing.assert_close(rotated.norm(dim=-1), norms)


def test_position_zero_changes_nothing() -> None:
    heads = torch.randn(1, 2, 8)
    rotated = heads.clone()
    torch_ops.rotary(rotated, *RotaryTable(8, Rope(10000.0), 4, CPU).at(torch.tensor([0]), torch.float32))
    assert torch.equal(rotated, heads)


def test_entries_do_not_depend_on_the_tables_length() -> None:
    short, long = RotaryTable(64, Rope(10000.0), 37, CPU), RotaryTable(64, Rope(10000.0), 8192, CPU)
    positions = torch.arange(37)
    for ours, theirs in zip(short.at(positions, torch.float32), long.at(positions, torch.float32), strict=True):
        assert torch.equal(ours, theirs)
