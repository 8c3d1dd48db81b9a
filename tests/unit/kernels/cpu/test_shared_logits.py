"""An output head that several members share gives the logits and the tokens of one, whatever the border."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from evensong import _native
from tests.unit.kernels.cpu.programs import (
    MAX_SAMPLES,
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
each_isa = pytest.mark.parametrize("isa", _native.supported_isas())
PADDED = VOCAB + 6  # outputs beyond the vocabulary
BANKS = 2


class Heads:
    """A head on its own, and one that members share, cut before the columns `borders`; member 0 reads."""

    def __init__(self, isa: str, borders: list[int], head: Any, table: Any, threads: int = 2) -> None:
        self._table, self._isa = table, isa
        size, edges = len(borders) + 1, [0, *borders, PADDED]
        self.whole = self._program()
        logits = self.whole.buffer(PADDED, "float32", True)
        self._append(self.whole, head, logits)
        self.whole.sampling(logits)
        memory = memory_of(_native.LogitsGroup.bytes(size, BANKS, MAX_SAMPLES, PADDED))
        self.members = []
        for member, (first, last) in enumerate(itertools.pairwise(edges)):
            group = _native.LogitsGroup(memory, member, size, BANKS, MAX_SAMPLES, PADDED)
            program = self._program()
            logits = program.shared_logits(group)
            self._append(program, head[first:last].copy(), logits, first_column=first)
            program.gather_logits(logits)
            if member == 0:
                program.sampling(logits)
            self.members.append(program)
        self.engine = _native.Engine(1)
        self.engines = [_native.Engine(threads) for _ in self.members]

    def _program(self) -> Any:
        program = new_program(self._isa, num_banks=BANKS)
        x, rows = program.buffer(WIDTH, "float32"), program.buffer(WIDTH, "float32", True)
        program.embedding(weight_of(self._table, self._isa), 1.0, x)
        program.copy_sampled(x, rows)
        return program

    def _append(self, program: Any, head: Any, logits: int, **more: Any) -> None:
        program.linear(1, weight_of(head, self._isa), None, "store", logits, sampled_rows=True, **more)

    def start(self, tokens: list[int], samples: bytes, others: bytes | None = None, **more: Any) -> list[int]:
        """A step of all members, each row of which is sampled; `others`: what the members that do not read are told."""
        rows = list(range(len(tokens)))
        told = [samples] + (len(self.members) - 1) * [samples if others is None else others]
        return [
            submit(engine, program, tokens, rows, told[i], **more)
            for i, (engine, program) in enumerate(zip(self.engines, self.members, strict=True))
        ]

    def finish(self, tickets: list[int]) -> Any:
        """What the reader sampled."""
        return [engine.wait(ticket) for engine, ticket in zip(self.engines, tickets, strict=True)][0]

    def run(self, tokens: list[int], samples: bytes, others: bytes | None = None, **more: Any) -> list[int]:
        result: list[int] = self.finish(self.start(tokens, samples, others, **more))[0].tolist()
        return result

    def alone(self, tokens: list[int], samples: bytes, **more: Any) -> list[int]:
        """The same step of the head on its own."""
        ticket = submit(self.engine, self.whole, tokens, list(range(len(tokens))), samples, **more)
        result: list[int] = self.engine.wait(ticket)[0].tolist()
        return result

    def logits(self, rows: int, bank: int = 0) -> Any:
        return self.members[0].view(2, rows, bank)[:, :VOCAB]


def heads(isa: str, borders: list[int], *, spoil: float | None = None) -> Heads:
    """Row t of the table likes token t most; `spoil` stands in the hidden state of token 3."""
    table = noise(VOCAB, WIDTH, seed=1)
    if spoil is not None:
        table[3] = spoil
    return Heads(isa, borders, noise(PADDED, WIDTH, seed=2), table)


BORDERS = [[45], [32, 64], [1, 95], [89], [94]]


@each_isa
@pytest.mark.parametrize("borders", BORDERS)
def test_logits_are_those_of_one_head(isa: str, borders: list[int]) -> None:
    both = heads(isa, borders)
    for step in range(4):
        tokens = list(range(5 * step, 5 * step + 1 + 2 * step))
        both.run(tokens, logits_only(len(tokens)), bank=step % BANKS)
        both.alone(tokens, logits_only(len(tokens)), bank=step % BANKS)
        whole = both.whole.view(2, len(tokens), step % BANKS)[:, :VOCAB]
        assert np.array_equal(both.logits(len(tokens), step % BANKS), whole) and whole.any()


@each_isa
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("spoil", [None, np.nan, np.inf])
@pytest.mark.parametrize("others", [None, logits_only(MAX_SAMPLES)])
def test_greedy_steps_choose_the_same(isa: str, borders: list[int], spoil: float | None, others: Any) -> None:
    """Whether the other members know that nobody reads logits or not; a row that is not finite has no token."""
    both, tokens = heads(isa, borders, spoil=spoil), list(range(MAX_SAMPLES))
    greedy = draw() * len(tokens)
    expected = both.alone(tokens, greedy)
    assert len(set(expected)) > 5 and (expected[3] == -1) == (spoil is not None)
    assert both.run(tokens, greedy, others) == expected
    assert both.run(tokens[1:], greedy[len(draw()) :], others and others[len(draw()) :], bank=1) == expected[1:]


@each_isa
@pytest.mark.parametrize("borders", [[45], [20, 60]])
def test_of_equal_logits_the_lowest_token_is_taken(isa: str, borders: list[int]) -> None:
    """Every token has a twin among the next member's columns; one more stands beyond the vocabulary."""
    head = noise(PADDED, WIDTH, seed=2)
    head[VOCAB:] = 100.0 * head[:6]
    twins = {token: token + borders[-1] - borders[0] + 20 for token in range(20)}
    for token, twin in twins.items():
        head[twin] = head[token]
    table = head[:VOCAB] * 50.0
    both = Heads(isa, borders, head, table)
    tokens = [twins[token] for token in (0, 5, 11, 19)]
    logits = both.alone(tokens, logits_only(4)) and both.whole.view(2, 4)[:, :VOCAB]
    assert [np.flatnonzero(row == row.max()).tolist() for row in logits] == [[t, twins[t]] for t in (0, 5, 11, 19)]
    assert both.run(tokens, draw() * 4) == [0, 5, 11, 19] == both.alone(tokens, draw() * 4)


@each_isa
@pytest.mark.parametrize("borders", [[45], [32, 64]])
def test_rows_that_are_drawn_and_masked_are_the_same(isa: str, borders: list[int]) -> None:
    both, tokens = heads(isa, borders), list(range(8))
    masks = np.zeros((2, 3), np.uint32)
    masks[0] = [1 << 31, 1, 1 << 20]
    masks[1] = 0xFFFFFFFF
    samples = draw(mask=0) + draw(temperature=0.9, seed=4, mask=0) + draw(temperature=1.3, seed=5, mask=1)
    samples += b"".join(draw(temperature=2.0, seed=seed) for seed in range(5))
    expected = both.alone(tokens, samples, masks=masks)
    assert both.run(tokens, samples, masks=masks) == expected and min(expected) >= 0
    # The same in two parts: the others have nothing to do in the second one.
    first = both.start(tokens, logits_only(8), last=both.members[1].num_segments, bank=1)
    sampler = both.members[0].num_segments - 1
    part = {"first": sampler, "masks": masks, "bank": 1}
    drawn = submit(both.engines[0], both.members[0], tokens, list(range(8)), samples, **part)
    both.finish(first)
    assert both.engines[0].wait(drawn)[0].tolist() == expected


def test_members_write_no_logits_that_are_still_read() -> None:
    """As when prompts are scored: the others are told everything at once, the reader part by part, in one bank."""
    both, parts = heads(ISA, [45]), [list(range(first, first + 9)) for first in range(0, 80, 9)]
    ahead = [submit(both.engines[1], both.members[1], part, list(range(9)), logits_only(9)) for part in parts]
    for part in parts:
        both.engines[0].wait(submit(both.engines[0], both.members[0], part, list(range(9)), logits_only(9)))
        mine = both.logits(9).copy()
        both.alone(part, logits_only(9))
        assert np.array_equal(mine, both.whole.view(2, 9)[:, :VOCAB])
        assert np.array_equal(both.logits(9), mine)
    for ticket in ahead:
        both.engines[1].wait(ticket)


def test_steps_that_sample_nothing_are_no_turn() -> None:
    both = heads(ISA, [45])
    expected = both.alone([4, 5], draw() * 2)
    for step in range(3):
        for engine, program in zip(both.engines, both.members, strict=True):
            engine.wait(submit(engine, program, [1, 2, 3]))
        assert both.run([4, 5], draw() * 2, bank=step % BANKS) == expected


def test_a_reader_that_wants_logits_hears_that_they_were_left_out() -> None:
    both = heads(ISA, [45])
    tickets = both.start([1, 2], draw(temperature=1.0) * 2, draw() * 2)
    both.engines[1].wait(tickets[1])
    with pytest.raises(RuntimeError, match="left out the logits"):
        both.engines[0].wait(tickets[0])


def test_cancel_ends_whoever_waits() -> None:
    both = heads(ISA, [45])
    for member in (0, 1):
        engine = both.engines[member]
        ticket = submit(engine, both.members[member], [1], [0], draw())
        assert not engine.ready(ticket)
        engine.cancel()
        with pytest.raises(RuntimeError, match="^cancelled$"):
            engine.wait(ticket)
        both = heads(ISA, [45])


def test_shared_logits_that_cannot_be() -> None:
    size = _native.LogitsGroup.bytes(2, BANKS, MAX_SAMPLES, PADDED)
    memory = memory_of(size)
    for wrong in (
        lambda: _native.LogitsGroup(memory[:-1], 0, 2, BANKS, MAX_SAMPLES, PADDED),
        lambda: _native.LogitsGroup(memory, 2, 2, BANKS, MAX_SAMPLES, PADDED),
        lambda: _native.LogitsGroup(memory, 0, 2, BANKS, MAX_SAMPLES, PADDED, reader=2),
        lambda: _native.LogitsGroup.bytes(2, 0, MAX_SAMPLES, PADDED),
    ):
        with pytest.raises(ValueError):
            wrong()
    other = _native.LogitsGroup(memory, 1, 2, BANKS, MAX_SAMPLES, PADDED)
    program = new_program(ISA, num_banks=BANKS)
    h, logits = program.buffer(WIDTH, "float32", True), program.shared_logits(other)
    own = program.buffer(VOCAB, "float32", True)
    weight = weight_of(noise(VOCAB, WIDTH), ISA)
    for wrong in (
        lambda: program.sampling(logits),
        lambda: program.gather_logits(own),
        lambda: program.linear(h, weight, None, "store", logits),
        lambda: program.linear(h, weight, None, "store", logits, sampled_rows=True, first_column=7),
        lambda: program.linear(h, weight, None, "store", logits, sampled_rows=True, first_column=-1),
        lambda: program.linear(h, weight, None, "store", own, sampled_rows=True, first_column=1),
        lambda: new_program(ISA).shared_logits(other),
        lambda: new_program(ISA, num_banks=BANKS, max_samples=MAX_SAMPLES - 1).shared_logits(other),
    ):
        with pytest.raises(ValueError):
            wrong()
