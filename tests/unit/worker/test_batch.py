"""A plan becomes flat arrays in the plan's order."""

from __future__ import annotations

from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import CachedRequestData, NewRequestData, SchedulerOutput
from evensong.worker.batch import build_batch
from evensong.worker.slots import SlotTable


def new(request_id: str, tokens: list[int], blocks: list[int], computed: int) -> NewRequestData:
    return NewRequestData(request_id, tokens, [], SamplingParams(), [], blocks, computed)


def test_a_mixed_batch() -> None:
    plan = SchedulerOutput(
        1,
        [
            new("long", list(range(100, 150)), [0, 1, 2, 3], 10),
            new("decode", [7, 8, 9], [5], 2),
            new("short", [60, 61], [6], 0),
        ],
        CachedRequestData(),
        {"decode": 1, "long": 16, "short": 2},
        ["decode", "short"],
        [],
    )
    slots = SlotTable()
    slots.apply(plan)
    batch = build_batch(plan, slots)
    assert batch.token_ids.tolist() == [9, *range(110, 126), 60, 61]
    assert batch.positions().tolist() == [2, *range(10, 26), 0, 1]
    assert batch.num_query_tokens == [1, 16, 2]
    assert batch.num_computed_tokens == [2, 10, 0]
    assert [table.tolist() for table in batch.block_tables] == [[[5]], [[0, 1, 2, 3]], [[6]]]
    assert batch.sample_rows.tolist() == [0, 18]


def test_tokens_that_are_not_known_are_named_by_their_feed_slots() -> None:
    slots = SlotTable()
    slots.apply(SchedulerOutput(1, [new(name, [5, 6], [0], 0) for name in "abc"], CachedRequestData(), {}, [], []))
    for step_id, name in ((3, "a"), (4, "b"), (4, "c")):
        slots[name].num_computed_tokens = 2
        slots[name].append_unknown(step_id)
    slots["c"].learn(4, 77)
    cached = CachedRequestData(["a", "c"], [[], []], [2, 2])
    batch = build_batch(SchedulerOutput(5, [], cached, {"a": 1, "c": 1}, ["a", "c"], []), slots)
    assert batch.token_ids.tolist() == [-1, 77] and batch.feed_after == 3
    batch = build_batch(SchedulerOutput(5, [], cached, {"b": 1, "a": 1}, ["b", "a"], []), slots)
    assert batch.token_ids.tolist() == [-2, -1] and batch.feed_after == 4
    batch = build_batch(SchedulerOutput(5, [], cached, {"c": 1}, ["c"], []), slots)
    assert batch.feed_after == -1


def test_an_empty_plan() -> None:
    batch = build_batch(SchedulerOutput(1, [], CachedRequestData(), {}, [], []), SlotTable())
    assert len(batch.token_ids) == len(batch.positions()) == len(batch.sample_rows) == 0
    assert batch.num_query_tokens == batch.num_computed_tokens == batch.block_tables == []
