"""The lifeline: orders come whole or not at all, and the process ends with its parent, whatever it does."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from evensong.utils.lifeline import PARENT_GONE, read_orders

WATCH = "import os, sys, time; from evensong.utils.lifeline import watch; watch(int(sys.argv[1])); os.write(1, b'!')\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


def test_orders_are_read_whole_however_they_arrive(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], struct.pack("<I", 5) + b"ab")
    if (child := os.fork()) == 0:
        time.sleep(0.05)
        os.write(pipe[1], b"cdeNEXT")
        os._exit(0)
    assert read_orders(pipe[0]) == b"abcde"
    assert os.read(pipe[0], 10) == b"NEXT", "no byte beyond the orders is taken"
    os.waitpid(child, 0)


@pytest.mark.parametrize("data", [b"", b"\x05\0", struct.pack("<I", 5) + b"abcd", struct.pack("<I", 2**31) + b"x"])
def test_orders_that_are_not_whole_are_an_eof(pipe: tuple[int, int], data: bytes) -> None:
    os.write(pipe[1], data)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        read_orders(pipe[0])


@pytest.mark.parametrize(
    "busy", ["time.sleep(60)", "while True: pass", "import threading; threading.Event().wait()", "os.read(0, 1)"]
)
def test_the_process_ends_at_once_when_the_lifeline_does(pipe: tuple[int, int], busy: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WATCH + busy, str(pipe[0])],
        pass_fds=[pipe[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None and child.stdout.read(1) == b"!"
        time.sleep(0.05)
        assert child.poll() is None
        begin = time.monotonic()
        os.close(pipe[1])
        assert child.wait(timeout=5) == PARENT_GONE
        assert time.monotonic() - begin < 1.0


def test_a_copy_of_the_parent_that_holds_the_lifeline_does_not_keep_the_child() -> None:
    """The parent forks, the copy keeps the pipe's other end open, the parent goes."""
    parent = f"""
import os, subprocess, sys
reading, writing = os.pipe()
child = subprocess.Popen([sys.executable, "-c", {WATCH + "time.sleep(60)"!r}, str(reading)], pass_fds=[reading],
                         stdout=subprocess.PIPE)
child.stdout.read(1)
copy = os.fork()
if copy == 0:
    import time
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
print(child.pid, copy, flush=True)
os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=20)
    child, copy = (int(word) for word in run.stdout.split())
    try:
        until = time.monotonic() + 5
        while _runs(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not _runs(child) and _runs(copy)
    finally:
        os.kill(copy, 9)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
