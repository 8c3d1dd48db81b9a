"""A scripted HTTP process: answers every request with what the launcher told it last, in plain text.

`GET /slow` is answered only after the launch drains, or after 30 s: a request that runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import struct
import threading
import time

import msgspec
import zmq

from evensong.config.sections import ServerConfig
from evensong.protocol.handshake import Bootstrap, Hello, HttpInit, Membership, Ready
from evensong.protocol.wire import MessageType, Stamp


class State:
    """What the launcher said last."""

    def __init__(self) -> None:
        self.membership = Membership([])
        self.server = ServerConfig()
        self.num_slow = 0
        self.drained_at: float | None = None


def answer(connection: socket.socket, state: State) -> None:
    """One request, one answer, one connection."""
    with connection:
        line = connection.recv(65536).split(b"\r\n")[0].decode()
        if "/slow" in line:
            state.num_slow += 1
            end = time.monotonic() + 30
            # A running request: its last bytes come a moment after the drain began.
            while state.drained_at is None and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(float(os.environ.get("FAKE_SLOW", "0.3")))
            state.num_slow -= 1
        states = ",".join(f"{m.state}:{m.reason}" for m in state.membership.members)
        members = f"states={states} draining={state.membership.draining} phase={state.membership.phase!r}"
        body = f"{members} key={','.join(state.server.api_key)}".encode()
        dead = any(m.state == "DEAD" for m in state.membership.members)
        status = "503 Gone" if dead or (state.membership.draining and "/slow" not in line) else "200 OK"
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def accept(listener: socket.socket, state: State) -> None:
    """Takes connections for as long as the process lives."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection, state), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-fd", type=int)
    parser.add_argument("--listen-fd", type=int)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (length,) = struct.unpack("<I", os.read(arguments.bootstrap_fd, 4))
    boot = msgspec.msgpack.decode(os.read(arguments.bootstrap_fd, length), type=Bootstrap)
    threading.Thread(target=lambda: (os.read(arguments.bootstrap_fd, 1), os._exit(0)), daemon=True).start()
    state = State()
    threading.Thread(target=accept, args=(socket.socket(fileno=arguments.listen_fd), state), daemon=True).start()
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(boot.handshake_address)
    stamp = Stamp(boot.token, boot.index, boot.incarnation)
    hello = Hello(boot.role, boot.index, os.getpid())
    dealer.send_multipart([stamp.header(MessageType.HELLO), msgspec.msgpack.encode(hello)])
    ends: float | None = None
    while True:
        if state.drained_at is not None and ends is not None and (state.num_slow == 0 or time.monotonic() > ends):
            time.sleep(0.05)
            os._exit(0)
        if not dealer.poll(20):
            continue
        head, payload = dealer.recv_multipart()
        match stamp.read(head).type:
            case MessageType.INIT:
                init = msgspec.msgpack.decode(payload, type=HttpInit)
                state.server = msgspec.msgpack.decode(init.server, type=ServerConfig)
            case MessageType.MEMBERSHIP:
                state.membership = msgspec.msgpack.decode(payload, type=Membership)
                core = next(iter(state.membership.members), None)
                if core is not None and core.resources is not None:
                    ready = msgspec.msgpack.encode(Ready(core.resources))
                    dealer.send_multipart([stamp.header(MessageType.READY), ready])
            case MessageType.SHUTDOWN:
                state.drained_at = time.monotonic()
                ends = state.drained_at + msgspec.msgpack.decode(payload, type=float)


if __name__ == "__main__":
    main()
