"""A scripted core: speaks the protocol of a real one, and misbehaves as $FAKE_CORE says.

It answers an ADD with an admission and one token per prompt token, in one message; a prompt of [13] is never answered.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import sys
import threading
import time

import msgspec
import zmq

from evensong.config.sections import EngineConfig
from evensong.protocol.handshake import Bootstrap, CoreInit, Failed, Hello, Ready
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import (
    Admission,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeath,
    FinishReason,
    UtilityReply,
)
from evensong.protocol.request import EngineCoreRequest, UtilityCall
from evensong.protocol.wire import ENGINE_CORE_DEAD, MessageType, Stamp, engine_identity, pack, unpack

RESOURCES = Resources(8, 16, 128, 4, 64, 100, 1024, "fake", {"weights": "none"})
encode = msgspec.msgpack.encode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-fd", type=int)
    parser.add_argument("--listen-fd", type=int)
    arguments = parser.parse_args()
    mode = os.environ.get("FAKE_CORE", "")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (length,) = struct.unpack("<I", os.read(arguments.bootstrap_fd, 4))
    boot = msgspec.msgpack.decode(os.read(arguments.bootstrap_fd, length), type=Bootstrap)
    threading.Thread(target=lambda: (os.read(arguments.bootstrap_fd, 1), os._exit(0)), daemon=True).start()
    if mode == "mute":
        time.sleep(60)
    if mode == "crash early":
        print("a line that explains it", file=sys.stderr)
        sys.exit(3)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(boot.handshake_address)
    stamp = Stamp(boot.token, boot.index, boot.incarnation)

    def say(type: MessageType, record: object) -> None:
        dealer.send_multipart([stamp.header(type), encode(record)])

    say(MessageType.HELLO, Hello(boot.role, boot.index, os.getpid()))
    head, payload = dealer.recv_multipart()
    assert stamp.read(head).type == MessageType.INIT
    init = msgspec.msgpack.decode(payload, type=CoreInit)
    config = msgspec.msgpack.decode(init.config, type=EngineConfig)
    if mode == "usage":
        say(MessageType.FAILED, Failed(f"there is no model {config.model.model!r}", usage=True))
        context.destroy(linger=1000)
        sys.exit(2)
    if mode == "crash while loading":
        print("the weights are broken", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "stuck while loading":
        time.sleep(60)
    serve(context, dealer, stamp, init, mode, say)


def serve(context, dealer, stamp, init, mode, say) -> None:  # type: ignore[no-untyped-def]
    requests = context.socket(zmq.DEALER)
    requests.setsockopt(zmq.ROUTING_ID, engine_identity(stamp.sender))
    requests.connect(init.clients[0].requests)
    outputs = context.socket(zmq.PUSH)
    outputs.connect(init.clients[0].outputs)
    requests.send_multipart([stamp.header(MessageType.HELLO), b""])
    say(MessageType.READY, Ready(RESOURCES))

    def reply(message: EngineCoreOutputs) -> None:
        outputs.send_multipart([stamp.header(MessageType.OUTPUTS), encode(message)])

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    poller = zmq.Poller()
    poller.register(requests, zmq.POLLIN)
    poller.register(dealer, zmq.POLLIN)
    while not (stop.is_set() and mode != "deaf"):
        ready = dict(poller.poll(20))
        if dealer in ready and stamp.read(dealer.recv_multipart()[0]).type == MessageType.SHUTDOWN and mode != "deaf":
            break
        if requests not in ready:
            continue
        head, payload = requests.recv_multipart()
        header = stamp.read(head)
        if header.type == MessageType.ADD:
            request = msgspec.msgpack.decode(payload, type=EngineCoreRequest)
            if request.prompt_token_ids == [13]:
                continue
            if request.prompt_token_ids == [14]:
                death = EngineDeath(stamp.sender, stamp.incarnation, "it was asked to die")
                outputs.send_multipart([stamp.header(MessageType.DEAD), ENGINE_CORE_DEAD, encode(death)])
                context.destroy(linger=1000)
                sys.exit(1)
            if request.prompt_token_ids == [15]:
                old = Stamp(stamp.token, stamp.sender, stamp.incarnation + 1)
                outputs.send_multipart([old.header(MessageType.OUTPUTS), encode(EngineCoreOutputs())])
            tokens = EngineCoreOutput(
                request.request_id, request.attempt, 0, request.prompt_token_ids, finish_reason=FinishReason.STOP
            )
            reply(EngineCoreOutputs(0, stamp.incarnation, [tokens], [Admission(request.request_id, request.attempt)]))
        elif header.type == MessageType.UTILITY:
            call = msgspec.msgpack.decode(payload, type=UtilityCall)
            args = unpack(call.args)
            if args.get("method") == "hang":
                continue
            if args.get("method") == "fail":
                reply(EngineCoreOutputs(utility=UtilityReply(call.call_id, failure="it was asked to fail")))
                continue
            reply(EngineCoreOutputs(utility=UtilityReply(call.call_id, pack([call.verb, args]))))
    context.destroy(linger=100)


if __name__ == "__main__":
    main()
