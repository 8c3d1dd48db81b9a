"""Slots and block tables follow the plans."""

from __future__ import annotations

import numpy as np
import pytest

from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import CachedRequestData, NewRequestData, SchedulerOutput
from evensong.worker.block_table import BlockTable
from evensong.worker.slots import SlotTable


def new(request_id: str, prompt: list[int], output: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(request_id, prompt, output, SamplingParams(), [2], blocks, computed)


def plan(
    new_requests: list[NewRequestData] | None = None,
    cached: CachedRequestData | None = None,
    released: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(1, new_requests or [], cached or CachedRequestData(), {}, [], released or [])


def test_a_newcomer_with_output_continues_where_it_stopped() -> None:
    slots = SlotTable()
    slots.apply(plan([new("a", [1, 2, 3], [7, 8], [4], 3)]))
    slot = slots["a"]
    assert slot.tokens.tolist() == [1, 2, 3, 7, 8]
    assert (slot.num_computed_tokens, slot.blocks.ids.tolist()) == (3, [[4]])
    slot.append_unknown(6)
    row = slot.sampling_row()
    assert list(row.prompt_token_ids) == [1, 2, 3] and list(row.output_token_ids) == [7, 8]
    assert row.position == 5 and list(row.eos_token_ids) == [2]


def test_tokens_are_kept_while_the_array_grows() -> None:
    slots = SlotTable()
    slots.apply(plan([new("a", list(range(100)), [], [0])]))
    for step_id, token_id in enumerate(range(1000, 1500)):
        slots["a"].append_unknown(step_id)
        slots["a"].learn(step_id, token_id)
    assert slots["a"].tokens.tolist() == [*range(100), *range(1000, 1500)]
    slots["a"].append_unknown(500)
    assert list(slots["a"].sampling_row().output_token_ids) == list(range(1000, 1500))


@pytest.mark.parametrize("length", [60, 61, 62, 63, 64, 65])
def test_a_row_made_before_its_tokens_are_known_has_them_later(length: int) -> None:
    """A step's rows are made while the step before is in flight, and read when that one is settled; arrays grow."""
    slots = SlotTable()
    slots.apply(plan([new("a", [1], list(range(length - 1)), [0])]))
    slot, rows = slots["a"], []
    for step_id in range(6):
        if step_id >= 2:
            slot.learn(step_id - 2, 100 + step_id - 2)
        slot.append_unknown(step_id)
        assert slot.tokens[-1] == -1 - slot.feed_slot
        rows.append(slot.sampling_row())
        if step_id >= 1:
            # As late as the runner settles the step before this row's.
            assert rows[step_id - 1].position == length + step_id - 1
            expected = [*range(length - 1), *range(100, 100 + step_id - 1)]
            assert list(rows[step_id - 1].output_token_ids) == expected


def test_feed_slots_are_given_back_and_never_shared() -> None:
    slots = SlotTable()
    slots.apply(plan([new(name, [1], [], [0]) for name in "abc"]))
    assert [slots[name].feed_slot for name in "abc"] == [0, 1, 2]
    slots.apply(plan([new("d", [1], [], [0]), new("e", [1], [], [0])], released=["b"]))
    assert [slots[name].feed_slot for name in "dace"] == [1, 0, 2, 3]
    slots.apply(plan([new(name, [1], [], [0]) for name in "wxyz"], released=list("acde")))
    assert sorted(slots[name].feed_slot for name in "wxyz") == [0, 1, 2, 3]


def test_the_plans_lists_are_not_shared() -> None:
    prompt, blocks = [1, 2], [5]
    slots = SlotTable()
    slots.apply(plan([new("a", prompt, [], blocks)]))
    slots["a"].append_unknown(2)
    slots["a"].blocks.extend([6])
    assert (prompt, blocks) == ([1, 2], [5])


def test_cached_requests_carry_only_what_grew() -> None:
    slots = SlotTable()
    slots.apply(plan([new("a", [1] * 20, [], [3]), new("b", [1], [], [9])]))
    slots.apply(plan(cached=CachedRequestData(["a", "b"], [[7, 8], []], [16, 1])))
    assert slots["a"].blocks.ids.tolist() == [[3, 7, 8]] and slots["a"].num_computed_tokens == 16
    assert slots["b"].blocks.ids.tolist() == [[9]] and slots["b"].num_computed_tokens == 1


def test_release_comes_before_a_newcomer_of_the_same_name() -> None:
    slots = SlotTable()
    slots.apply(plan([new("a", [1], [], [0]), new("b", [1], [], [1])]))
    slots.apply(plan([new("a", [1], [4], [5])], released=["a", "b", "never seen"]))
    assert len(slots) == 1 and slots["a"].tokens.tolist() == [1, 4]


def test_a_block_table_grows_in_place() -> None:
    table = BlockTable([1, 2, 3])
    expected = [1, 2, 3]
    for start in range(10, 400, 3):
        table.extend(range(start, start + 3))
        expected += range(start, start + 3)
    assert table.ids.tolist() == [expected]
    assert table.ids.dtype == np.int32
    table.extend([])
    assert table.ids.tolist() == [expected]


def test_a_block_table_of_several_groups_takes_them_side_by_side() -> None:
    table = BlockTable([1, 11, 21, 2, 12, 22], 3)
    for block in range(3, 40):
        table.extend([block, 10 + block, 20 + block])
    assert table.ids.tolist() == [[first + i for i in range(1, 40)] for first in (0, 10, 20)]
    slots = SlotTable(2)
    slots.apply(plan([new("a", [1] * 20, [], [3, 4])]))
    slots.apply(plan(cached=CachedRequestData(["a"], [[5, 6, 7, 8]], [16])))
    assert slots["a"].blocks.ids.tolist() == [[3, 5, 7], [4, 6, 8]]
