"""The ring: every reader gets every message, whole and in order, whatever its size; memory stays as it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from evensong.utils.doorbell import Doorbell
from evensong.utils.shm_ring import RingClosed, RingReader, RingWriter, make_ring

SMALL = 4096
ECHO = """
import sys
from evensong.utils.doorbell import Doorbell
from evensong.utils.shm_ring import RingReader, RingWriter
down, up, index, bell, back = map(int, sys.argv[1:])
reader, bell = RingReader(down, index), Doorbell((bell, bell))
writer = RingWriter(up, [Doorbell((back, back))])
while True:
    bell.wait()
    while (message := reader.receive()) is not None:
        writer.send(bytes(message), 10)
        if not message:
            sys.exit(0)
"""


class Pair:
    """A ring with its writer and readers in one process."""

    def __init__(self, num_bytes: int = SMALL, num_readers: int = 1) -> None:
        self.fd = make_ring("test", num_bytes)
        self.bells = [Doorbell() for _ in range(num_readers)]
        self.writer = RingWriter(self.fd, self.bells)
        self.readers = [RingReader(self.fd, index) for index in range(num_readers)]

    def close(self) -> None:
        self.writer.release()
        for reader in self.readers:
            reader.release()
        for bell in self.bells:
            bell.close()
        os.close(self.fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(num_readers=2)
    yield made
    made.close()


def test_every_reader_gets_every_message_in_order(pair: Pair) -> None:
    assert pair.readers[0].receive() is None
    sent = [bytes([n]) * n for n in range(40)]
    for message in sent:
        pair.writer.send(message, 1)
    for reader in pair.readers:
        got = []
        while (message := reader.receive()) is not None:
            got.append(bytes(message))
        assert got == sent


def test_a_sender_rings_every_reader(pair: Pair) -> None:
    pair.writer.send(b"x", 1)
    assert all(bell.wait(0) for bell in pair.bells)
    assert not any(bell.wait(0) for bell in pair.bells)


def test_messages_wrap_around_at_every_place(pair: Pair) -> None:
    """Lengths that share no factor with the ring's: each comes to lie over its end in every way."""
    for number in range(3000):
        message = bytes([number % 251]) * (number % 613)
        pair.writer.send(message, 1)
        for reader in pair.readers:
            got = reader.receive()
            assert got is not None and bytes(got) == message
            assert reader.receive() is None


def test_messages_larger_than_the_ring() -> None:
    pair = Pair()
    generator = random.Random(5)
    sent = [generator.randbytes(size) for size in (SMALL, 3 * SMALL + 5, 0, 50 * SMALL + 1, SMALL // 2, 7)]
    got: list[bytes] = []

    def read() -> None:
        while len(got) < len(sent):
            assert pair.bells[0].wait(10)
            while (message := pair.readers[0].receive()) is not None:
                got.append(bytes(message))

    thread = threading.Thread(target=read)
    thread.start()
    for message in sent:
        pair.writer.send(message, 10)
    thread.join(20)
    assert got == sent
    pair.close()


def test_a_slow_reader_is_waited_for_and_named(pair: Pair) -> None:
    fast, slow = pair.readers
    with pytest.raises(TimeoutError, match=r"reader 1 has made no room in 0\.05 s"):
        for _ in range(100):
            pair.writer.send(b"x" * 100, 0.05)
            fast.receive()
            fast.receive()
    assert slow.receive() is not None


def test_room_made_in_time_is_used() -> None:
    pair = Pair()
    (reader,) = pair.readers
    while pair.writer._written + 1008 <= SMALL:
        pair.writer.send(b"y" * 1000, 1)

    def make_room() -> None:
        time.sleep(0.05)
        while reader.receive() is not None:
            pass

    thread = threading.Thread(target=make_room)
    thread.start()
    pair.writer.send(b"z" * 1000, 10)
    thread.join()
    message = reader.receive()
    # The slow thread may have seen it already.
    assert message is None or bytes(message) == b"z" * 1000
    pair.close()


def test_what_was_received_stays_until_the_next_call() -> None:
    pair = Pair()
    (reader,) = pair.readers
    pair.writer.send(b"a" * 1500, 1)
    message = reader.receive()
    assert message is not None
    with pytest.raises(TimeoutError):
        for _ in range(10):
            pair.writer.send(b"b" * 1500, 0)
    assert bytes(message) == b"a" * 1500
    del message
    pair.close()


def test_close_frees_a_writer_that_waits(pair: Pair) -> None:
    raised: list[BaseException] = []

    def fill() -> None:
        try:
            for _ in range(100):
                pair.writer.send(b"x" * 1000, 60)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    pair.writer.close()
    thread.join(10)
    assert len(raised) == 1 and isinstance(raised[0], RingClosed)


def test_readers_in_other_processes_and_flat_memory() -> None:
    """Every message comes back from both; after a warm-up, 20,000 more take no memory anywhere."""
    down, bells, back = make_ring("down"), [Doorbell(), Doorbell()], Doorbell()
    ups = [make_ring("up", 1 << 16) for _ in bells]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ECHO, *map(str, (down, up, index, bell.read_fd, back.write_fd))],
            pass_fds=(down, up, bell.read_fd, back.write_fd),
        )
        for index, (bell, up) in enumerate(zip(bells, ups, strict=True))
    ]
    writer, readers = RingWriter(down, bells), [RingReader(up) for up in ups]
    processes = [psutil.Process(), *(psutil.Process(child.pid) for child in children)]
    generator = random.Random(3)

    def rounds(count: int) -> None:
        for _ in range(count):
            message = generator.randbytes(generator.randrange(1, 5000))
            writer.send(message, 10)
            waiting = set(range(len(readers)))
            while waiting:
                assert back.wait(20)
                for index in list(waiting):
                    if (answer := readers[index].receive()) is not None:
                        assert bytes(answer) == message
                        waiting.discard(index)

    try:
        rounds(3000)
        before = [process.memory_info().rss for process in processes]
        rounds(20_000)
        after = [process.memory_info().rss for process in processes]
        assert all(new - old < 1 << 20 for new, old in zip(after, before, strict=True)), (before, after)
        writer.send(b"", 10)
        assert [child.wait(20) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
            child.wait()
        for fd in (down, *ups):
            os.close(fd)
        for bell in (*bells, back):
            bell.close()
