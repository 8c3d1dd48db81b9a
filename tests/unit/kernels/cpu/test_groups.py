"""Members of a group add up what each has computed: in the order of the members, whoever comes last."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from evensong import _native
from tests.unit.kernels.cpu.member import read, started, summed, summing, table_of, tokens_of
from tests.unit.kernels.cpu.programs import (
    MAX_ROWS,
    VOCAB,
    WIDTH,
    memory_of,
    new_program,
    noise,
    shared_memory,
    submit,
    weight_of,
)

ISA = _native.supported_isas()[0]
each_isa = pytest.mark.parametrize("isa", _native.supported_isas())


def groups(size: int) -> list[Any]:
    memory = memory_of(_native.Group.bytes(size, MAX_ROWS, WIDTH))
    return [_native.Group(memory, member, size, MAX_ROWS, WIDTH) for member in range(size)]


@each_isa
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["add", "store"])
def test_the_sum_is_in_the_order_of_the_members(isa: str, size: int, mode: str) -> None:
    """Step after step in the queue, with other numbers of rows, three exchanges each: an odd number."""
    programs = [summing(isa, group, member, mode, ops=3) for member, group in enumerate(groups(size))]
    engines = [_native.Engine(1 + member % 2) for member in range(size)]
    for first in range(0, 24, 4):
        steps = range(first, first + 4)
        tickets = [
            [submit(engine, program, tokens_of(step)) for step in steps]
            for engine, program in zip(engines, programs, strict=True)
        ]
        for engine, mine in zip(engines, tickets, strict=True):
            for ticket in mine:
                engine.wait(ticket)
        tokens = tokens_of(steps[-1])
        for program in programs:
            assert np.array_equal(program.view(0, len(tokens)), summed(tokens, size, mode, 3))


def test_the_order_of_the_members_shows_in_the_sum() -> None:
    """Else the test above would prove less than it says."""
    tokens = list(range(VOCAB))
    a, b, c = (table_of(member)[tokens] for member in range(3))
    assert not np.array_equal((a + b) + c, (c + b) + a)


@each_isa
def test_processes_add_up(isa: str) -> None:
    steps, size = 40, 2
    needed = _native.Group.bytes(size, MAX_ROWS, WIDTH)
    fd, _ = shared_memory(needed)
    try:
        orders: list[list[Any]] = [["sum", isa, member, size, steps] for member in range(size)]
        with started(fd, needed, orders) as members:
            outputs = [member.communicate(timeout=60)[0] for member in members]
            assert [member.returncode for member in members] == [0, 0]
    finally:
        os.close(fd)
    for output in outputs:
        for step, rows in enumerate(read(output, steps)):
            assert np.array_equal(rows, summed(tokens_of(step), size, "add", 3))


def test_a_late_member_is_waited_for() -> None:
    programs = [summing(ISA, group, member, "store") for member, group in enumerate(groups(3))]
    engines = [_native.Engine(1) for _ in range(3)]
    tickets = [submit(engines[i], programs[i], [5, 6]) for i in (0, 1)]
    time.sleep(0.15)
    assert not any(engines[i].ready(tickets[i]) for i in (0, 1))
    engines[2].wait(submit(engines[2], programs[2], [5, 6]))
    for engine, ticket in zip(engines[:2], tickets, strict=True):
        engine.wait(ticket)
    for program in programs:
        assert np.array_equal(program.view(0, 2), summed([5, 6], 3, "store"))


def test_a_program_of_each_step_shares_the_group() -> None:
    """As under --enforce-eager: where a part lies follows the group, not the program; members need not do the same."""
    two = groups(2)
    engines = [_native.Engine(1) for _ in two]
    kept = summing(ISA, two[1], 1, "store", ops=3)
    for step in range(5):
        tokens = tokens_of(step)
        ticket = submit(engines[1], kept, tokens)
        program = new_program(ISA)
        x, part = program.buffer(WIDTH, "float32"), program.exchange(two[0])
        for _ in range(3):
            first = program.num_segments
            program.embedding(weight_of(table_of(0), ISA), 1.0, part)
            engines[0].wait(submit(engines[0], program, tokens, first=first))
            assert np.array_equal(program.view(part, len(tokens)), table_of(0)[tokens])
            program.all_reduce(part, x, "store")
            engines[0].wait(submit(engines[0], program, tokens, first=first + 1))
        engines[1].wait(ticket)
        for view in (program.view(x, len(tokens)), kept.view(0, len(tokens))):
            assert np.array_equal(view, summed(tokens, 2, "store"))


def test_cancel_ends_a_member_that_waits() -> None:
    group = groups(2)[0]
    engine = _native.Engine(2)
    ticket = submit(engine, summing(ISA, group, 0, "add"), [1, 2, 3])
    time.sleep(0.05)
    engine.cancel()
    with pytest.raises(RuntimeError, match="^cancelled$"):
        engine.wait(ticket)


@each_isa
def test_members_hold_parts_of_a_vocabulary(isa: str) -> None:
    """Each embeds the tokens that it has, the others as zeros: the sum is the whole table's rows."""
    table, border = noise(VOCAB, WIDTH, seed=5), 37
    programs = []
    for group, rows in zip(groups(2), (slice(0, border), slice(border, VOCAB)), strict=True):
        program = new_program(isa)
        x, part = program.buffer(WIDTH, "float32"), program.exchange(group)
        program.embedding(weight_of(table[rows].copy(), isa), 0.5, part, first_row=rows.start)
        program.all_reduce(part, x, "store")
        programs.append(program)
    engines = [_native.Engine(1) for _ in programs]
    tokens = [0, 36, 37, 89, 50]
    tickets = [submit(engine, program, tokens) for engine, program in zip(engines, programs, strict=True)]
    for engine, ticket, program in zip(engines, tickets, programs, strict=True):
        engine.wait(ticket)
        assert np.array_equal(program.view(0, 5), table[tokens] * np.float32(0.5))


@each_isa
def test_products_of_parts_of_the_inputs(isa: str) -> None:
    """As a layer split by rows: each member's product goes to the exchange, and the sum onto the stream."""
    table, weight = noise(VOCAB, 24, seed=1), noise(WIDTH, 24, seed=2)
    cuts = [slice(0, 16), slice(16, 24)]
    alone, programs = [], []
    for group, cut in zip(groups(2), cuts, strict=True):
        program = new_program(isa)
        h, own = program.buffer(cut.stop - cut.start, "float32"), program.buffer(WIDTH, "float32")
        x, part = program.buffer(WIDTH, "float32"), program.exchange(group)
        product = weight_of(weight[:, cut].copy(), isa)
        program.embedding(weight_of(table[:, cut].copy(), isa), 1.0, h)
        program.embedding(weight_of(table_of(99), isa), 1.0, x)
        program.linear(h, product, None, "store", own)
        program.linear(h, product, None, "store", part)
        program.all_reduce(part, x, "add")
        programs.append(program)
        alone.append(own)
    engines = [_native.Engine(2), _native.Engine(1)]
    tokens = list(range(20))
    for engine, ticket in [(e, submit(e, p, tokens)) for e, p in zip(engines, programs, strict=True)]:
        engine.wait(ticket)
    parts = [program.view(own, 20) for program, own in zip(programs, alone, strict=True)]
    for program in programs:
        assert np.array_equal(program.view(2, 20), table_of(99)[tokens] + (parts[0] + parts[1]))
    np.testing.assert_allclose(parts[0] + parts[1], table[tokens] @ weight.T, rtol=1e-4, atol=1e-4)


def test_groups_that_cannot_be() -> None:
    memory = memory_of(_native.Group.bytes(2, MAX_ROWS, WIDTH))
    for wrong in (
        lambda: _native.Group(memory[:-1], 0, 2, MAX_ROWS, WIDTH),
        lambda: _native.Group(memory[8:], 0, 1, MAX_ROWS, WIDTH),
        lambda: _native.Group(memory, 2, 2, MAX_ROWS, WIDTH),
        lambda: _native.Group(memory, -1, 2, MAX_ROWS, WIDTH),
        lambda: _native.Group(memory, 0, 0, MAX_ROWS, WIDTH),
        lambda: _native.Group.bytes(65, MAX_ROWS, WIDTH),
        lambda: _native.Group.bytes(2, 0, WIDTH),
        lambda: _native.Group.bytes(2, MAX_ROWS, 0),
    ):
        with pytest.raises(ValueError):
            wrong()
    group = _native.Group(memory, 0, 2, MAX_ROWS, WIDTH)
    program = new_program(ISA)
    x, part = program.buffer(WIDTH, "float32"), program.exchange(group)
    weight = weight_of(noise(WIDTH, WIDTH), ISA)
    for wrong in (
        lambda: program.all_reduce(x, x, "add"),
        lambda: program.all_reduce(part, part, "add"),
        lambda: program.all_reduce(part, x, "mul"),
        lambda: program.all_reduce(part, program.buffer(WIDTH + 1, "float32"), "add"),
        lambda: program.linear(part, weight, None, "store", x),
        lambda: program.embedding(weight_of(table_of(0), ISA), 1.0, x, first_row=1),
        lambda: new_program(ISA, max_rows=MAX_ROWS + 1).exchange(group),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError):
        program.exchange(memory)
