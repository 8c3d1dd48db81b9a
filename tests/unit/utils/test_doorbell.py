"""Doorbells and memory without a name."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from evensong.utils.doorbell import Doorbell, anonymous_memory


@pytest.fixture(params=["eventfd", "pipe"])
def doorbell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Doorbell:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    made = Doorbell()
    assert (made.read_fd != made.write_fd) == (request.param == "pipe")
    return made


def test_rung_often_it_wakes_once(doorbell: Doorbell) -> None:
    assert not doorbell.wait(0)
    for _ in range(5):
        doorbell.ring()
    assert doorbell.wait()
    assert not doorbell.wait(0.01)
    doorbell.close()


def test_it_never_blocks_whoever_rings(doorbell: Doorbell) -> None:
    for _ in range(20_000):  # more than a pipe holds
        doorbell.ring()
    assert doorbell.wait(0)
    doorbell.close()


def test_it_wakes_who_sleeps(doorbell: Doorbell) -> None:
    woken = threading.Event()

    def sleep() -> None:
        doorbell.wait()
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    assert not woken.wait(0.02)
    # As native code does, with the descriptors that another process inherited.
    os.write(Doorbell(doorbell.fds).write_fd, (1).to_bytes(8, "little"))
    assert woken.wait(10)
    thread.join()
    doorbell.close()


@pytest.mark.parametrize("named", [False, True])
def test_memory_is_zero_and_shared(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if named:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = anonymous_memory("test", 8192)
    with mmap.mmap(fd, 8192) as one, mmap.mmap(fd, 8192) as other:
        assert not any(one[:])
        one[5000] = 7
        assert other[5000] == 7
    os.close(fd)
