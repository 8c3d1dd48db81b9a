"""Both multiprocess clients against a scripted core in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from evensong.config.resolve import resolve
from evensong.engine.client.mp_async import AsyncMPClient
from evensong.engine.client.mp_sync import SyncMPClient
from evensong.protocol.errors import ConfigError, EngineDeadError, EngineStartError, UtilityError
from evensong.protocol.handshake import ClientAddress, Member, Membership
from evensong.protocol.output import FinishReason
from evensong.protocol.wire import Stamp
from tests.engine.fake_core import RESOURCES
from tests.engine.launching import LAUNCHER, children, eventually, request

CONFIG = resolve({"model": "demo"})


@pytest.fixture
def client() -> Iterator[SyncMPClient]:
    made = SyncMPClient(CONFIG, LAUNCHER)
    yield made
    made.shutdown()


def test_requests_and_verbs_are_answered(client: SyncMPClient) -> None:
    assert client.resources == RESOURCES
    for number in range(3):
        client.add_request(request(f"r{number}", 5, 6))
    for number in range(3):
        message = client.get_output()
        assert [a.request_id for a in message.admissions] == [f"r{number}"]
        (output,) = message.outputs
        assert (output.request_id, output.new_token_ids) == (f"r{number}", [5, 6])
        assert output.finish_reason is FinishReason.STOP
    assert client.call_utility("reset_prefix_cache") == ["reset_prefix_cache", {}]
    client.abort_requests(["r0"])
    with pytest.raises(UtilityError, match="asked to fail"):
        client.call_utility("collective_rpc", method="fail", args=[])
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="collective_rpc was not answered within 0.2 s"):
        client.call_utility("collective_rpc", 0.2, method="hang", args=[])
    assert time.monotonic() - begin < 1.0
    client.add_request(request("again", 7))
    assert client.get_output().outputs[0].new_token_ids == [7]


def test_a_message_of_another_incarnation_or_launch_is_dropped(client: SyncMPClient, sockets_base: Path) -> None:
    client._channel.incarnation = 1
    client.add_request(request("old", 15))
    assert client.get_output().outputs[0].request_id == "old"
    assert client.num_dropped == 1
    folder = next(sockets_base.iterdir())
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger, context.socket(zmq.DEALER) as intruder:
        stranger.connect(f"ipc://{folder}/outputs-0")
        stranger.send_multipart([b"x" * 28, b"\xc0"])
        intruder.setsockopt(zmq.ROUTING_ID, b"zz")
        intruder.connect(f"ipc://{folder}/requests-0")
        intruder.send_multipart([b"not a header", b""])
        assert eventually(lambda: client.num_dropped >= 2)

        def both() -> bool:
            client.call_utility("reset_prefix_cache")
            return client.num_dropped == 3

        assert eventually(both)


def test_shutdown_fails_waiters_and_later_calls() -> None:
    client = SyncMPClient(CONFIG, LAUNCHER)
    caught = []

    def wait() -> None:
        try:
            client.get_output()
        except EngineDeadError as error:
            caught.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.shutdown()
    waiter.join(2)
    assert caught == ["the engine was shut down"]
    for call in (
        client.get_output,
        lambda: client.add_request(request("r", 1)),
        lambda: client.abort_requests(["r"]),
        lambda: client.call_utility("reset_prefix_cache"),
    ):
        with pytest.raises(EngineDeadError):
            call()
    client.shutdown()


@pytest.mark.parametrize(
    ("mode", "error"),
    [("usage", ConfigError), ("crash early", EngineStartError), ("crash while loading", EngineStartError)],
)
@pytest.mark.parametrize("make", [SyncMPClient, AsyncMPClient.launch])
def test_a_construction_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, sockets_base: Path, make: type, mode: str, error: type[Exception]
) -> None:
    monkeypatch.setenv("FAKE_CORE", mode)
    before = children()
    threads = threading.active_count()
    with pytest.raises(error):
        make(CONFIG, LAUNCHER)
    assert children() == before
    assert not any(sockets_base.iterdir())
    assert eventually(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("make", [SyncMPClient, AsyncMPClient.launch])
def test_an_interrupt_during_construction_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, sockets_base: Path, make: type
) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evensong.engine.launch.Launch.wait_ready", interrupted)
    before = children()
    with pytest.raises(KeyboardInterrupt):
        make(CONFIG, LAUNCHER)
    assert children() == before
    assert not any(sockets_base.iterdir())


def test_a_client_that_nobody_holds_frees_its_core(sockets_base: Path) -> None:
    before = children()
    client = SyncMPClient(CONFIG, LAUNCHER)
    assert children() != before
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    assert eventually(lambda: children() == before)
    assert not any(sockets_base.iterdir())


def test_a_killed_core_fails_every_waiter_of_the_sync_client_within_a_second(client: SyncMPClient) -> None:
    ends: dict[str, float] = {}

    def waiter(name: str) -> None:
        try:
            if name == "output":
                client.get_output()
            else:
                client.call_utility("collective_rpc", method="hang", args=[])
        except EngineDeadError:
            ends[name] = time.monotonic()

    client.add_request(request("hangs", 13))
    threads = [threading.Thread(target=waiter, args=(name,)) for name in ("output", "utility")]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    begin = time.monotonic()
    kill_core(client)
    for thread in threads:
        thread.join(2)
    assert set(ends) == {"output", "utility"}
    assert max(ends.values()) - begin < 1.0
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.add_request(request("late", 1))


def kill_core(client: SyncMPClient | AsyncMPClient) -> None:
    """SIGKILL for the core, as the system would do it."""
    background = client._background if isinstance(client, AsyncMPClient) else client._finalizer.peek()[1]
    assert background is not None
    for child in background.launch._children.values():
        child.kill()


def test_last_words_of_a_dying_core_are_the_reason(client: SyncMPClient) -> None:
    client.add_request(request("fatal", 14))
    with pytest.raises(EngineDeadError, match="it was asked to die"):
        client.get_output()


def test_the_async_client_answers_and_dies_with_its_core() -> None:
    async def scene() -> None:
        client = AsyncMPClient.launch(CONFIG, LAUNCHER)
        try:
            for number in range(20, 40):
                await client.add_request(request(f"r{number}", number))
            tokens = [(await client.get_output()).outputs[0].new_token_ids for _ in range(20)]
            assert tokens == [[number] for number in range(20, 40)]
            assert await client.call_utility("reset_prefix_cache") == ["reset_prefix_cache", {}]
            with pytest.raises(UtilityError, match="asked to fail"):
                await client.call_utility("collective_rpc", method="fail", args=[])
            with pytest.raises(TimeoutError, match="not answered within 0.1 s"):
                await client.call_utility("collective_rpc", 0.1, method="hang", args=[])
            await client.abort_requests(["r20"])
            hangs = [
                asyncio.create_task(client.get_output()),
                asyncio.create_task(client.get_output()),
                asyncio.create_task(client.call_utility("collective_rpc", method="hang", args=[])),
            ]
            await asyncio.sleep(0.1)
            begin = time.monotonic()
            kill_core(client)
            ends = await asyncio.wait_for(asyncio.gather(*hangs, return_exceptions=True), 2)
            assert time.monotonic() - begin < 1.0
            assert [type(end) for end in ends] == [EngineDeadError] * 3
            assert client.dead_error is not None and "SIGKILL" in str(client.dead_error)
            for coroutine in (client.get_output(), client.abort_requests([]), client.add_request(request("x", 1))):
                with pytest.raises(EngineDeadError):
                    await coroutine
        finally:
            client.shutdown()

    asyncio.run(scene())


def test_a_client_of_someone_elses_launch_queues_until_the_core_connects(tmp_path: Path) -> None:
    """What the HTTP process does: sockets and membership come from the launcher."""
    address = ClientAddress(0, f"ipc://{tmp_path}/r", f"ipc://{tmp_path}/o")
    token = b"t" * 16

    async def scene() -> None:
        client = AsyncMPClient(address, Stamp(token, 0, 1))
        context = zmq.Context()
        core = context.socket(zmq.DEALER)
        try:
            with pytest.raises(EngineStartError, match="still starting"):
                _ = client.resources
            client.update_membership(Membership([Member(0, 1, "CONNECTED")]))
            for number in range(5):
                await client.add_request(request(f"r{number}", 1))
            core.setsockopt(zmq.ROUTING_ID, b"\x00\x00")
            core.connect(address.requests)
            # The loop must turn for the requests to be tried again.
            seen = []
            while len(seen) < 5:
                await asyncio.sleep(0.01)
                with_message = await asyncio.to_thread(core.poll, 200)
                if with_message:
                    seen.append(core.recv_multipart()[1])
            assert [request_id_of(payload) for payload in seen] == [f"r{number}" for number in range(5)]
            client.update_membership(Membership([Member(0, 1, "READY", RESOURCES)]))
            assert client.resources == RESOURCES
            waiter = asyncio.create_task(client.get_output())
            await asyncio.sleep(0)
            client.update_membership(Membership([Member(0, 1, "DEAD", RESOURCES, "it was killed")]))
            with pytest.raises(EngineDeadError, match="it was killed"):
                await asyncio.wait_for(waiter, 1)
        finally:
            client.shutdown()
            context.destroy(linger=0)

    asyncio.run(scene())


def request_id_of(payload: bytes) -> str:
    fields = msgspec.msgpack.decode(payload)
    return str(fields[0])


def test_requests_that_wait_for_a_core_fail_when_it_dies(tmp_path: Path) -> None:
    address = ClientAddress(0, f"ipc://{tmp_path}/r", f"ipc://{tmp_path}/o")

    async def scene() -> None:
        client = AsyncMPClient(address, Stamp(b"t" * 16, 0, 1))
        try:
            call = asyncio.create_task(client.call_utility("reset_prefix_cache"))
            await asyncio.sleep(0.05)
            client.update_membership(Membership([Member(0, 1, "DEAD", None, "it never came up")]))
            with pytest.raises(EngineDeadError, match="it never came up"):
                await asyncio.wait_for(call, 1)
        finally:
            client.shutdown()

    asyncio.run(scene())
