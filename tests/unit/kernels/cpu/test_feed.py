"""Tokens that steps of other ranks sample; and what one hears of a step while it runs."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from evensong import _native
from tests.unit.kernels.cpu.programs import (
    BLOCK,
    VOCAB,
    WIDTH,
    draw,
    logits_only,
    memory_of,
    new_program,
    noise,
    submit,
    weight_of,
)

ISA = _native.supported_isas()[0]
FEED_BYTES = 64 + 8 * 8
TABLE = noise(VOCAB, WIDTH)
LONG_ENOUGH = 0.15  # for a step that does not wait to end, and for a sleeper to have looked


def embedder(isa: str = ISA, **more: Any) -> Any:
    program = new_program(isa, **more)
    program.embedding(weight_of(TABLE, isa), 1.0, program.buffer(WIDTH, "float32"))
    return program


def sampler(isa: str = ISA, **more: Any) -> Any:
    """Of each token it samples the one after it; its buffer 1 has the logits."""
    program = new_program(isa, **more)
    x, logits = program.buffer(VOCAB, "float32"), program.buffer(VOCAB, "float32", True)
    rows = program.buffer(VOCAB, "float32", True)
    program.embedding(weight_of(np.roll(np.eye(VOCAB, dtype=np.float32), 1, axis=1), isa), 1.0, x)
    program.copy_sampled(x, rows)
    program.linear(rows, weight_of(np.eye(VOCAB, dtype=np.float32), isa), None, "store", logits, sampled_rows=True)
    program.sampling(logits)
    return program


def stays_open(engine: Any, ticket: int) -> bool:
    time.sleep(LONG_ENOUGH)
    return not engine.ready(ticket)


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_a_step_waits_until_its_tokens_are_published(isa: str) -> None:
    feed = memory_of(FEED_BYTES)
    reader, writer, engine = embedder(isa, feed=feed), embedder(isa, feed=feed), _native.Engine(2)
    assert reader.published == -1
    ticket = submit(engine, reader, [3, -1 - 5, -1 - 0], feed_after=1)
    assert stays_open(engine, ticket)
    writer.feed(np.array([5, 0]), np.array([17, 80]))
    writer.publish(0)
    assert stays_open(engine, ticket) and reader.published == 0
    writer.publish(1)
    engine.wait(ticket)
    assert np.array_equal(reader.view(0, 3), TABLE[[3, 17, 80]])
    writer.publish(0)
    assert reader.published == 1, "it never falls"
    engine.wait(submit(engine, reader, [-1 - 5], feed_after=0))
    assert np.array_equal(reader.view(0, 1), TABLE[[17]])


def test_a_step_publishes_when_all_its_rows_are_drawn() -> None:
    """And the steps of another engine that wait for it go on, one after the other."""
    feed = memory_of(FEED_BYTES)
    source, follower = sampler(feed=feed), embedder(feed=feed)
    first, second = _native.Engine(2), _native.Engine(1)
    waiting = [submit(second, follower, [-1 - slot], feed_after=step) for step in range(30) for slot in (step % 8,)]
    seen = []
    for step in range(30):
        tokens = first.wait(
            submit(first, source, [step], [0], draw(slot=step % 8), step_id=step, publishes=True, bank=0)
        )[0]
        assert tokens.tolist() == [step + 1] and source.published == step
        second.wait(waiting[step])
        seen.append(follower.view(0, 1)[0].copy())
    assert np.array_equal(seen, TABLE[1:31])


def test_steps_in_a_queue_feed_each_other_at_once() -> None:
    engine, program = _native.Engine(2), sampler()
    tickets = [submit(engine, program, [4], [0], draw(slot=2), step_id=0, publishes=True)]
    for step in range(1, 20):
        more = {"step_id": step, "feed_after": step - 1, "publishes": True}
        tickets.append(submit(engine, program, [-1 - 2], [0], draw(slot=2), **more))
    assert [engine.wait(ticket)[0].tolist() for ticket in tickets] == [[5 + step] for step in range(20)]
    assert program.published == 19


def test_of_a_step_in_two_parts_the_draw_publishes() -> None:
    engine, program = _native.Engine(2), sampler(num_banks=2)
    last = program.num_segments - 1
    engine.wait(submit(engine, program, [7], [0], logits_only(1), last=last, step_id=3, bank=1))
    assert program.published == -1
    drawn = submit(engine, program, [7], [0], draw(slot=0), first=last, step_id=3, bank=1, publishes=True)
    assert engine.wait(drawn)[0].tolist() == [8] and program.published == 3


def test_what_waits_for_a_step_that_fails_fails_too() -> None:
    feed = memory_of(FEED_BYTES)
    source, follower = new_program(ISA, feed=feed), embedder(feed=feed)
    source.embedding(weight_of(TABLE, ISA), 1.0, source.buffer(WIDTH, "float32"))

    def fail(rows: int) -> None:
        raise KeyError("by the hook")

    source.callback("hook", fail)
    first, second = _native.Engine(1), _native.Engine(1)
    ticket = submit(second, follower, [-1], feed_after=4)
    with pytest.raises(KeyError, match="by the hook"):
        first.wait(submit(first, source, [1], step_id=4, publishes=True))
    with pytest.raises(RuntimeError, match="has failed"):
        second.wait(ticket)
    assert source.published == -1
    with pytest.raises(RuntimeError, match="earlier part of this step has failed"):
        first.wait(submit(first, source, [1], step_id=4, first=1))
    source.publish(5)
    second.wait(submit(second, follower, [-1], feed_after=4))


def test_cancel_ends_a_step_that_waits() -> None:
    engine, program = _native.Engine(2), embedder()
    tickets = [submit(engine, program, [-1], feed_after=step) for step in range(3)]
    assert stays_open(engine, tickets[0])
    engine.cancel()
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="^cancelled$"):
            engine.wait(ticket)
    engine.wait(submit(engine, program, [3]))


def test_an_engine_that_goes_leaves_no_step_waiting() -> None:
    """Else its end would wait for a rank that may be gone; what does not wait runs to its end."""
    calls: list[int] = []
    engine, waits, runs = _native.Engine(2), embedder(), embedder()
    runs.callback("hook", calls.append)
    submit(engine, waits, [-1], feed_after=0)
    submit(engine, runs, [1, 2])
    del engine
    gc.collect()
    assert calls == [2]


def test_a_feed_table_has_room_and_is_aligned() -> None:
    for memory in (memory_of(FEED_BYTES)[:-1], memory_of(FEED_BYTES + 8)[8:]):
        with pytest.raises(ValueError, match="feed table"):
            new_program(ISA, feed=memory)
    with pytest.raises(TypeError):
        new_program(ISA, feed=np.zeros(64, np.float32))
    program = embedder()
    for slots, tokens in (([8], [1]), ([-1], [1]), ([0], [VOCAB]), ([0], [-1]), ([0, 1], [1])):
        with pytest.raises(ValueError):
            program.feed(np.array(slots), np.array(tokens))
    with pytest.raises(ValueError):
        program.publish(-1)


def test_steps_that_cannot_be() -> None:
    engine, program = _native.Engine(1), sampler(num_banks=2)
    wrong: list[dict[str, Any]] = [
        {"bank": 2},
        {"bank": -1},
        {"publishes": True},
        {"step_id": -2},
        {"feed_after": -2},
        {"copies": np.array([[0, 8]], np.int32)},
        {"copies": np.array([[-1, 0]], np.int32)},
        {"copies": np.array([[0, 1, 2]], np.int32)},
    ]
    for more in wrong:
        with pytest.raises(ValueError):
            submit(engine, program, [1], **more)
            pytest.fail(str(more))


def test_logits_of_a_bank_stay_while_the_next_step_runs() -> None:
    engine, program = _native.Engine(2), sampler(num_banks=2)
    for step in range(6):
        tokens = [step, step + 10]
        engine.wait(submit(engine, program, tokens, [0, 1], logits_only(2), bank=step % 2))
        for back in range(min(step + 1, 2)):
            expected = np.eye(VOCAB, dtype=np.float32)[[step - back + 1, step - back + 11]]
            assert np.array_equal(program.view(1, 2, (step - back) % 2), expected)
    with pytest.raises(ValueError, match="banks"):
        program.view(1, 2, 2)


def cached(isa: str, caches: list[tuple[Any, int, int]]) -> Any:
    """A program whose layers keep keys and values in these arrays: (array, kv heads, group)."""
    dim = 16
    program = new_program(isa, num_groups=2)
    turns = np.zeros((256, dim // 2), np.float32)
    for array, heads, group in caches:
        x, query = program.buffer(3 * heads * dim, "float32"), program.buffer(heads * dim, "float32")
        program.embedding(weight_of(noise(VOCAB, 3 * heads * dim), isa), 1.0, x)
        cache = _native.Cache(array, heads, dim, group)
        program.rope(x, cache, heads, turns, turns, None, 1e-5, query)
        program.attention(query, cache, heads, 1.0, 0.0, program.buffer(heads * dim, "float32"))
    return program


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_blocks_are_copied_in_order_before_all_else(dtype: type) -> None:
    """Layers of two groups share an array: it is copied once."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1000, (8 * BLOCK + 1, 64)).astype(dtype) for _ in range(2)]
    expected = [array.copy() for array in arrays]
    pairs = [(4, 5), (5, 6), (6, 4), (7, 7)]
    for array in expected:
        blocks = array[:-1].reshape(8, BLOCK, 64)
        for source, target in pairs:
            blocks[target] = blocks[source]
    program = cached(ISA, [(arrays[0], 2, 0), (arrays[1], 2, 0), (arrays[0], 2, 1), (arrays[1], 2, 1)])
    engine = _native.Engine(2)
    counts, starts = np.empty(0, np.int32), np.empty(0, np.int32)
    nothing = np.empty(0, np.int64)
    step = (counts, starts, [], nothing, nothing, np.empty(0, np.uint8))
    engine.wait(engine.submit(program, *step, copies=np.array(pairs, np.int32)))
    for array, wanted in zip(arrays, expected, strict=True):
        assert np.array_equal(array, wanted)


def test_copies_wait_for_the_steps_before() -> None:
    array = np.zeros((8 * BLOCK + 1, 32), np.float32)
    program = cached(ISA, [(array, 1, 0)])
    gate, seen = threading.Event(), []

    def hold(rows: int) -> None:
        gate.wait()
        array[4 * BLOCK] = 3.0

    holding = new_program(ISA)
    holding.callback("hold", hold)
    after = cached(ISA, [(array, 1, 0)])
    after.callback("look", lambda rows: seen.append(float(array[5 * BLOCK, 0])))
    engine = _native.Engine(2)
    tables = {"tables": [np.arange(8, dtype=np.int32).reshape(2, 4)]}
    first = submit(engine, holding, [1])
    counts, starts, tokens = np.array([1], np.int32), np.zeros(1, np.int32), np.array([1])
    rows = (np.empty(0, np.int64), np.empty(0, np.uint8))
    copies = np.array([[4, 5]], np.int32)
    second = engine.submit(after, counts, starts, tables["tables"], tokens, *rows, copies=copies)
    assert not engine.ready(second) and array[5 * BLOCK, 0] == 0.0
    gate.set()
    engine.wait(first)
    engine.wait(second)
    assert seen == [3.0]
    assert program.num_segments + 1 == after.num_segments


def test_a_ticket_is_ready_when_its_step_has_ended_and_the_doorbell_rings() -> None:
    engine, program = _native.Engine(2), embedder()
    bell = os.eventfd(0)
    try:
        engine.set_doorbell(bell)
        tickets = [submit(engine, program, [3]) for _ in range(4)]
        failing = submit(engine, program, [-1], feed_after=0)
        rung = 0
        while rung < 4:
            rung += os.eventfd_read(bell)
        assert all(engine.ready(ticket) for ticket in tickets) and not engine.ready(failing)
        engine.cancel()
        assert os.eventfd_read(bell) == 1 and engine.ready(failing)
        for ticket in tickets:
            engine.wait(ticket)
        with pytest.raises(RuntimeError):
            engine.wait(failing)
        engine.set_doorbell(-1)
        for _ in range(2):  # when the second one ends the first one has had its time to ring
            engine.wait(submit(engine, program, [3]))
        os.eventfd_write(bell, 1)
        assert os.eventfd_read(bell) == 1
    finally:
        engine.set_doorbell(-1)
        os.close(bell)
    with pytest.raises(ValueError, match="ticket"):
        engine.ready(1000)


def test_steps_are_noted_when_spans_are() -> None:
    engine, program = _native.Engine(2), embedder()
    engine.wait(submit(engine, program, [3], step_id=1))
    engine.record_spans(True)
    for step in (2, 3):
        engine.wait(submit(engine, program, [3] * step, step_id=step))
    engine.wait(submit(engine, program, [3]))
    engine.record_spans(False)
    engine.wait(submit(engine, program, [3], step_id=4))
    steps, spans = engine.take_steps(), engine.take_spans()
    assert steps[:, [0, 3]].tolist() == [[2, 2], [3, 3], [-1, 1]]
    assert (steps[:, 1] <= steps[:, 2]).all() and (steps[1:, 1] >= steps[:-1, 2]).all()
    assert (spans[:, 2] >= steps[0, 1]).all() and (spans[:, 3] <= steps[-1, 2]).all()
    assert engine.take_steps().shape == (0, 4)


def test_threads_are_bound_to_the_processors_that_are_given() -> None:
    chosen = sorted(os.sched_getaffinity(0))[-1]
    seen: list[set[int]] = []
    program = embedder()
    program.callback("where", lambda rows: seen.append(os.sched_getaffinity(0)))
    for threads in (1, 3):
        engine = _native.Engine(threads, processors=[chosen])
        engine.wait(submit(engine, program, [3]))
    assert seen == [{chosen}, {chosen}]
    with pytest.raises(ValueError):
        _native.Engine(1, processors=[])
