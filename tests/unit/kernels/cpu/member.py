"""One member of a group, or one end of a channel, as a process of its own: `python -m tests.unit.kernels.cpu.member`.

Arguments: what to do, the descriptor of the shared memory, its size, and the numbers that it asks for. What the steps
gave is written to standard output as it lies in memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from evensong import _native
from tests.unit.kernels.cpu.programs import MAX_ROWS, VOCAB, WIDTH, mapped, new_program, noise, submit, weight_of


def table_of(member: int) -> Any:
    return noise(VOCAB, WIDTH, seed=member)


def summing(isa: str, group: Any, member: int, mode: str, ops: int = 1) -> Any:
    """Each row of buffer 0 is the sum of the members' rows for its token, `ops` times over."""
    program = new_program(isa)
    x, part = program.buffer(WIDTH, "float32"), program.exchange(group)
    if mode == "add":
        program.embedding(weight_of(table_of(99), isa), 1.0, x)
    for _ in range(ops):
        program.embedding(weight_of(table_of(member), isa), 1.0, part)
        program.all_reduce(part, x, mode)
    return program


def summed(tokens: list[int], size: int, mode: str, ops: int = 1) -> Any:
    """What `summing` gives, by numpy."""
    total = table_of(0)[tokens]
    for member in range(1, size):
        total = total + table_of(member)[tokens]
    if mode == "store":
        return total
    x = table_of(99)[tokens]
    for _ in range(ops):
        x = x + total
    return x


def tokens_of(step: int) -> list[int]:
    """Another number of rows for every step."""
    return [(7 * step + 3 * row) % VOCAB for row in range(1 + 13 * step % MAX_ROWS)]


def sum_steps(memory: Any, isa: str, member: int, size: int, steps: int) -> None:
    program = summing(isa, _native.Group(memory, member, size, MAX_ROWS, WIDTH), member, "add", ops=3)
    run_all(program, steps)


def receive_steps(memory: Any, isa: str, steps: int) -> None:
    program = new_program(isa)
    program.receive(_native.Channel(memory, 2, MAX_ROWS, WIDTH), program.buffer(WIDTH, "float32"))
    run_all(program, steps)


def run_all(program: Any, steps: int) -> None:
    """Written at the end: nobody may be waiting for a member whose output nobody reads yet."""
    engine, rows = _native.Engine(1), []
    for step in range(steps):
        tokens = tokens_of(step)
        engine.wait(submit(engine, program, tokens, step_id=step))
        rows.append(program.view(0, len(tokens)).tobytes())
    sys.stdout.buffer.write(b"".join(rows))


def main() -> None:
    what, fd, size, isa, *numbers = sys.argv[1:]
    memory = mapped(int(fd), int(size))
    {"sum": sum_steps, "receive": receive_steps}[what](memory, isa, *map(int, numbers))
    sys.stdout.flush()


@contextlib.contextmanager
def started(fd: int, size: int, orders: list[list[Any]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each order, (what, isa, numbers ...), over the memory behind `fd`; none is left."""
    command = [sys.executable, "-m", "tests.unit.kernels.cpu.member"]
    members = [
        subprocess.Popen([*command, what, str(fd), str(size), *map(str, rest)], pass_fds=[fd], stdout=subprocess.PIPE)
        for what, *rest in orders
    ]
    try:
        yield members
    finally:
        for member in members:
            member.kill()
            member.communicate()


def read(output: bytes, steps: int) -> list[Any]:
    """The rows of each step."""
    rows = np.frombuffer(output, np.float32).reshape(-1, WIDTH)
    ends = np.cumsum([len(tokens_of(step)) for step in range(steps)])
    return np.split(rows, ends[:-1])


if __name__ == "__main__":
    main()
