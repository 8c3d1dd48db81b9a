"""A child's side of the start-up conversation, against a launcher's socket."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue

import msgspec
import zmq

from evensong.engine.core.handshake import ChildHandshake
from evensong.protocol.handshake import Bootstrap, Failed, Hello
from evensong.protocol.wire import MessageType, Stamp
from tests.unit.engine.core.making import STAMP


def test_hello_messages_both_ways_and_garbage_between(tmp_path_factory: object, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/h"
    received: SimpleQueue[tuple[MessageType, bytes]] = SimpleQueue()

    def receive(type: MessageType, payload: bytes) -> None:
        received.put((type, payload))
        if payload == b"throw":
            raise ValueError("a receiver that fails")

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.rcvtimeo = 5000
        router.bind(address)
        handshake = ChildHandshake(Bootstrap(STAMP.token, address, "core", 5, 2), receive, context)
        identity, header, payload = router.recv_multipart()
        read = STAMP.read(header)
        assert (read.type, read.sender, read.incarnation) == (MessageType.HELLO, 5, 2)
        assert msgspec.msgpack.decode(payload, type=Hello) == Hello("core", 5, os.getpid())
        for frames in ([b"x"], [Stamp(b"y" * 16, 0, 1).header(MessageType.INIT), b"z"], [b"", b"", b""]):
            router.send_multipart([identity, *frames])
        for payload in (b"throw", b"1"):
            router.send_multipart([identity, STAMP.header(MessageType.INIT), payload])
        assert [received.get(timeout=5) for _ in range(2)] == [(MessageType.INIT, b"throw"), (MessageType.INIT, b"1")]
        assert received.empty()
        handshake.send(MessageType.FAILED, Failed("why", usage=True))
        handshake.close()
        _, header, payload = router.recv_multipart()
        assert STAMP.read(header).type is MessageType.FAILED
        assert msgspec.msgpack.decode(payload, type=Failed) == Failed("why", True)
