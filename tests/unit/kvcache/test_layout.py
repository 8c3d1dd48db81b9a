"""Layer groups and what a request takes of them, against counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evensong.kvcache.layout import KVLayout, bytes_per_block, group_layers, merge_specs
from evensong.protocol.kv_spec import LayerGroup, LayerKVSpec


def specs(windows: str, widths: str | None = None) -> list[LayerKVSpec]:
    """One layer a letter: f keeps all, s and t have windows of 8 and 20; widths are numbers of heads."""
    lengths = {"f": None, "s": 8, "t": 20}
    heads = [int(width) for width in widths or "1" * len(windows)]
    return [LayerKVSpec(i, heads[i], 8, "float32", 4, lengths[kind]) for i, kind in enumerate(windows)]


def test_layers_of_one_kind_are_one_group() -> None:
    assert group_layers(specs("fff")) == (LayerGroup(None, (0, 1, 2)),)
    assert group_layers(specs("sss", "123")) == (LayerGroup(8, (0, 1, 2)),)


def test_a_hybrid_has_groups_of_equal_size() -> None:
    assert group_layers(specs("sssfsssf")) == (
        LayerGroup(8, (0, 1)),
        LayerGroup(8, (2, 4)),
        LayerGroup(8, (5, 6)),
        LayerGroup(None, (3, 7)),
    )
    assert [len(group.layers) for group in group_layers(specs("sssssf" * 3))] == [3] * 6
    assert {group.window for group in group_layers(specs("fst"))} == {None, 8, 20}


def test_counts_that_do_not_divide_leave_the_last_group_short() -> None:
    assert [len(group.layers) for group in group_layers(specs("sssssff"))] == [2, 2, 1, 2]
    # Two groups, one of them one layer short, rather than three.
    assert [len(group.layers) for group in group_layers(specs("sssssffff"))] == [5, 4]


def test_layers_of_different_widths_keep_every_block() -> None:
    assert group_layers(specs("sfs", "121")) == (LayerGroup(None, (0, 1, 2)),)


def test_a_block_holds_one_groups_tokens() -> None:
    for windows, widths, layers in (("fff", "121", 4), ("ssf", "111", 1), ("sssssff", "1111111", 2)):
        made = specs(windows, widths)
        assert bytes_per_block(made, group_layers(made), 16) == layers * (2 * 8 * 4) * 16


def test_a_stage_has_memory_for_its_own_layers_only() -> None:
    whole = specs("sssssff")
    groups = group_layers(whole)
    one = 2 * 8 * 4 * 16
    # Groups (0, 1), (2, 3), (4,), (5, 6): a stage's layers of each group share its own tensors from the first on.
    assert [bytes_per_block(whole[:cut], groups, 16) for cut in range(1, 8)] == [one, *[2 * one] * 6]
    assert [bytes_per_block(whole[cut:], groups, 16) for cut in range(7)] == [2 * one] * 6 + [one]
    assert bytes_per_block(whole[3:5], groups, 16) == one


def test_specs_of_ranks_are_those_of_the_model() -> None:
    whole = specs("sfsf")
    narrow = [LayerKVSpec(spec.layer, 1, 4, "float32", 4, spec.window) for spec in whole]
    assert merge_specs([whole[2:], narrow[2:], narrow[:2], whole[:2]]) == whole
    assert group_layers(merge_specs([whole[:2], whole[2:]])) == group_layers(whole)


def test_capacity_by_hand() -> None:
    assert KVLayout(4).capacity(10) == 40
    assert KVLayout(4, (None, None)).capacity(11) == 20
    assert KVLayout(4, (8,), 4).capacity(3) == 12
    # 11 tokens seen or computed in a step touch at most 4 blocks.
    assert KVLayout(4, (8,), 4).most_blocks(8) == 4 and KVLayout(4, (8,), 4).capacity(4) is None
    assert KVLayout(4, (8, None), 4).capacity(14) == 40
    with pytest.raises(AssertionError):
        KVLayout(4, (8,))


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 9), st.integers(1, 60))
def test_the_peak_is_what_steps_hold(block_size: int, window: int, chunk: int, num_tokens: int) -> None:
    layout = KVLayout(block_size, (window,), chunk)
    most = 0
    for start in range(num_tokens):
        end = min(start + chunk, num_tokens)
        seen = {position // block_size for position in range(max(start - window + 1, 0), end)}
        assert min(seen) == layout.first_block(start, window)
        most = max(most, len(seen))
    assert most <= layout.peak_blocks(num_tokens)
    longest = KVLayout(block_size, (window,), chunk).most_blocks(window)
    assert longest == max(
        len({position // block_size for position in range(start - window + 1, start + chunk)})
        for start in range(window, window + block_size)
    )


@given(st.integers(1, 4), st.sampled_from([(None,), (5,), (None, 3), (7, None, 7), (3, 9)]), st.integers(0, 60))
def test_capacity_is_the_longest_that_fits(block_size: int, windows: tuple[int | None, ...], num_blocks: int) -> None:
    layout = KVLayout(block_size, windows, 4)
    capacity = layout.capacity(num_blocks)
    if capacity is None:
        assert None not in windows and layout.peak_blocks(10**9) <= num_blocks
    else:
        assert layout.peak_blocks(capacity) <= num_blocks < layout.peak_blocks(capacity + 1)
