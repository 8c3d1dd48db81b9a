"""The lifeline: orders come whole, and a child ends when its parent does, whatever it is busy with."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time

import pytest

from evensong.utils.lifeline import PARENT_GONE, read_orders

BUSY = """
import sys, time
from evensong.utils.lifeline import read_orders, watch
orders = read_orders(int(sys.argv[1]))
watch(int(sys.argv[1]))
print(orders.decode(), flush=True)
while True:
    sum(range(1000))
"""


def test_orders_are_read_whole_however_they_come() -> None:
    read, write = os.pipe()
    os.write(write, struct.pack("<I", 5) + b"he")
    os.write(write, b"llo and more")
    assert read_orders(read) == b"hello" and os.read(read, 100) == b" and more"
    os.close(write)
    with pytest.raises(EOFError):
        read_orders(read)
    os.close(read)


@pytest.mark.parametrize("data", [b"", b"\x01", struct.pack("<I", 9) + b"short", struct.pack("<I", 2**31) + b"x"])
def test_orders_that_are_not_whole_are_an_end_of_file(data: bytes) -> None:
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    with pytest.raises(EOFError):
        read_orders(read)
    os.close(read)


def test_a_busy_child_ends_when_the_pipe_does() -> None:
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(read)], pass_fds=[read], stdout=subprocess.PIPE
    ) as child:
        os.close(read)
        try:
            os.write(write, struct.pack("<I", 2) + b"go")
            assert child.stdout is not None and child.stdout.readline() == b"go\n"
            os.write(write, b"later bytes are no end")
            time.sleep(0.1)
            assert child.poll() is None
            begin = time.monotonic()
            os.close(write)
            assert child.wait(5) == PARENT_GONE and time.monotonic() - begin < 1.0
        finally:
            child.kill()
