"""Arrivals: every message of a socket, in order, on a loop; however they come, and whatever happens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq

from evensong.engine.client.mp_async import MOST_IN_A_ROW, Arrivals

Scene = Callable[[zmq.Socket[bytes], zmq.Socket[bytes]], Awaitable[None]]


def run(scene: Scene) -> None:
    """A scene with two sockets that are connected, which are gone afterwards."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        left.bind("inproc://arrivals")
        right.connect("inproc://arrivals")
        asyncio.run(asyncio.wait_for(scene(left, right), 10))  # type: ignore[arg-type]  # an async function is one
    finally:
        context.destroy(linger=0)


async def turns(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    while not condition():
        await asyncio.sleep(0.001)


def test_all_that_comes_is_taken_in_order() -> None:
    async def scene(left: zmq.Socket[bytes], right: zmq.Socket[bytes]) -> None:
        taken: list[list[bytes]] = []
        right.send_multipart([b"before"])
        arrivals = Arrivals(asyncio.get_running_loop(), left, taken.append, pytest.fail)  # type: ignore[arg-type]
        await turns(lambda: len(taken) == 1)
        many = [[b"%d" % number, b"x"] for number in range(10 * MOST_IN_A_ROW)]
        for frames in many:
            right.send_multipart(frames)
        await turns(lambda: len(taken) == 1 + len(many))
        assert taken == [[b"before"], *many]
        right.send_multipart([b"after a rest"])
        await turns(lambda: taken[-1] == [b"after a rest"])
        arrivals.close()

    run(scene)


def test_others_on_the_loop_get_their_turns() -> None:
    async def scene(left: zmq.Socket[bytes], right: zmq.Socket[bytes]) -> None:
        seen: list[int] = []
        taken: list[list[bytes]] = []
        for number in range(9 * MOST_IN_A_ROW):
            right.send_multipart([b"%d" % number])
        arrivals = Arrivals(asyncio.get_running_loop(), left, taken.append, pytest.fail)  # type: ignore[arg-type]
        while len(taken) < 9 * MOST_IN_A_ROW:
            await asyncio.sleep(0)
            seen.append(len(taken))
        assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 2 * MOST_IN_A_ROW, (
            "in a turn the descriptor may call for it, and it may have asked for another turn"
        )
        arrivals.close()

    run(scene)


def test_what_is_sent_on_the_socket_loses_no_arrival() -> None:
    """Each use of a socket may take the descriptor's word that something has come."""

    async def scene(left: zmq.Socket[bytes], right: zmq.Socket[bytes]) -> None:
        taken: list[list[bytes]] = []
        arrivals = Arrivals(asyncio.get_running_loop(), left, taken.append, pytest.fail)  # type: ignore[arg-type]
        for number in range(200):
            right.send_multipart([b"%d" % number])
            left.send_multipart([b"answer"])
            arrivals.read()
            assert right.recv_multipart() == [b"answer"]
        await turns(lambda: len(taken) == 200)
        arrivals.close()

    run(scene)


def test_what_cannot_be_taken_is_told_once() -> None:
    async def scene(left: zmq.Socket[bytes], right: zmq.Socket[bytes]) -> None:
        errors: list[Exception] = []

        def refuse(frames: list[bytes]) -> None:
            raise ValueError(str(frames))

        Arrivals(asyncio.get_running_loop(), left, refuse, errors.append)
        right.send_multipart([b"one"])
        right.send_multipart([b"two"])
        await turns(lambda: bool(errors))
        await asyncio.sleep(0.01)
        assert [str(error) for error in errors] == ["[b'one']"]

    run(scene)


@pytest.mark.parametrize("how", ["here", "in a thread", "when the loop is closed", "with the socket first"])
def test_nothing_is_left_of_what_is_closed(how: str) -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    late: list[Arrivals] = []

    async def scene(left: zmq.Socket[bytes], right: zmq.Socket[bytes]) -> None:
        taken: list[list[bytes]] = []
        arrivals = Arrivals(asyncio.get_running_loop(), left, taken.append, pytest.fail)  # type: ignore[arg-type]
        if how == "when the loop is closed":
            late.append(arrivals)
            return
        if how == "with the socket first":
            left.close(linger=0)
        if how == "in a thread":
            await asyncio.to_thread(arrivals.close)
        else:
            arrivals.close()
        await asyncio.sleep(0.01)
        arrivals.read()
        assert not taken

    run(scene)
    for arrivals in late:
        arrivals.close()
    assert len(os.listdir("/proc/self/fd")) == num_files
