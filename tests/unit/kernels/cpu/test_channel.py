"""From stage to stage: steps come in the order in which they are sent, and no more than there are places for."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from evensong import _native
from tests.unit.kernels.cpu.member import read, started, table_of, tokens_of
from tests.unit.kernels.cpu.programs import (
    MAX_ROWS,
    VOCAB,
    WIDTH,
    memory_of,
    new_program,
    shared_memory,
    submit,
    weight_of,
)

ISA = _native.supported_isas()[0]


def channels(places: int) -> tuple[Any, Any]:
    """Both ends."""
    memory = memory_of(_native.Channel.bytes(places, MAX_ROWS, WIDTH))
    sender, receiver = (_native.Channel(memory, places, MAX_ROWS, WIDTH) for _ in range(2))
    return sender, receiver


def sending(channel: Any) -> Any:
    program = new_program(ISA)
    x = program.buffer(WIDTH, "float32")
    program.embedding(weight_of(table_of(0), ISA), 1.0, x)
    program.send(x, channel)
    return program


def receiving(channel: Any) -> Any:
    program = new_program(ISA)
    program.receive(channel, program.buffer(WIDTH, "float32"))
    return program


@pytest.mark.parametrize("places", [1, 2, 3])
def test_steps_come_in_order(places: int) -> None:
    """All at once in the sender's queue; other numbers of rows, none in one step."""
    sender, receiver = channels(places)
    first, second = _native.Engine(2), _native.Engine(1)
    source, target = sending(sender), receiving(receiver)
    sent = [submit(first, source, tokens_of(step), step_id=step) for step in range(30)]
    for step in range(30):
        tokens = tokens_of(step)
        second.wait(submit(second, target, tokens, step_id=step))
        assert np.array_equal(target.view(0, len(tokens)), table_of(0)[tokens])
    for ticket in sent:
        first.wait(ticket)


def test_a_sender_is_no_further_ahead_than_there_are_places() -> None:
    sender, receiver = channels(2)
    first, second = _native.Engine(1), _native.Engine(1)
    source, target = sending(sender), receiving(receiver)
    tickets = [submit(first, source, [step]) for step in range(4)]
    first.wait(tickets[0])
    first.wait(tickets[1])
    time.sleep(0.15)
    assert not first.ready(tickets[2])
    second.wait(submit(second, target, [9]))
    first.wait(tickets[2])
    time.sleep(0.15)
    assert not first.ready(tickets[3])
    for step in range(1, 4):
        second.wait(submit(second, target, [9]))
        assert np.array_equal(target.view(0, 1), table_of(0)[[step]])
    first.wait(tickets[3])


def test_a_receiver_waits_for_the_sender_and_cancel_ends_both() -> None:
    sender, receiver = channels(1)
    first, second = _native.Engine(1), _native.Engine(1)
    source, target = sending(sender), receiving(receiver)
    early = submit(second, target, [1, 2])
    time.sleep(0.15)
    assert not second.ready(early)
    first.wait(submit(first, source, [1, 2]))
    second.wait(early)
    first.wait(submit(first, source, [1]))
    waiting = [(first, submit(first, source, [1]))]
    second.wait(submit(second, target, [1]))
    first.wait(waiting.pop()[1])
    waiting = [(first, submit(first, source, [1])), (second, submit(second, receiving(channels(1)[1]), [1]))]
    time.sleep(0.05)
    for engine, ticket in waiting:
        assert not engine.ready(ticket)
        engine.cancel()
        with pytest.raises(RuntimeError, match="^cancelled$"):
            engine.wait(ticket)


@pytest.mark.parametrize("other", [{"tokens": [1, 2]}, {"step_id": 4}])
def test_stages_that_do_not_run_the_same_step_hear_of_it(other: dict[str, Any]) -> None:
    sender, receiver = channels(2)
    engine = _native.Engine(1)
    engine.wait(submit(engine, sending(sender), [1, 2, 3], step_id=3))
    step = {"tokens": [1, 2, 3], "step_id": 3, **other}
    with pytest.raises(RuntimeError, match="another step"):
        engine.wait(submit(engine, receiving(receiver), step.pop("tokens"), **step))


def test_from_process_to_process() -> None:
    steps, needed = 40, _native.Channel.bytes(2, MAX_ROWS, WIDTH)
    fd, memory = shared_memory(needed)
    try:
        with started(fd, needed, [["receive", ISA, steps]]) as (receiver,):
            engine, source = _native.Engine(1), sending(_native.Channel(memory, 2, MAX_ROWS, WIDTH))
            tickets = [submit(engine, source, tokens_of(step), step_id=step) for step in range(steps)]
            output = receiver.communicate(timeout=60)[0]
            assert receiver.returncode == 0
            for ticket in tickets:
                engine.wait(ticket)
    finally:
        os.close(fd)
    for step, rows in enumerate(read(output, steps)):
        assert np.array_equal(rows, table_of(0)[tokens_of(step)])


def test_channels_that_cannot_be() -> None:
    memory = memory_of(_native.Channel.bytes(2, MAX_ROWS, WIDTH))
    for wrong in (
        lambda: _native.Channel(memory[:-1], 2, MAX_ROWS, WIDTH),
        lambda: _native.Channel(memory[4:], 1, MAX_ROWS, WIDTH),
        lambda: _native.Channel.bytes(0, MAX_ROWS, WIDTH),
        lambda: _native.Channel.bytes(2, MAX_ROWS, -1),
    ):
        with pytest.raises(ValueError):
            wrong()
    channel = _native.Channel(memory, 2, MAX_ROWS, WIDTH)
    program = new_program(ISA)
    for wrong in (
        lambda: program.send(program.buffer(WIDTH + 1, "float32"), channel),
        lambda: program.receive(channel, program.buffer(WIDTH, "bfloat16")),
        lambda: program.send(7, channel),
        lambda: new_program(ISA, max_rows=VOCAB).receive(channel, 0),
    ):
        with pytest.raises(ValueError):
            wrong()
