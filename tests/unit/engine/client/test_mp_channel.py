"""Frames and pending calls of the multiprocess clients."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from evensong.engine.client.mp_channel import CoreChannel, UtilityCalls, fault_of, utility_args
from evensong.protocol.errors import EngineDeadError, EngineStartError, UtilityError
from evensong.protocol.handshake import Member, Membership
from evensong.protocol.output import EngineCoreOutputs, EngineDeath, UtilityReply
from evensong.protocol.request import EngineCoreRequest, UtilityCall
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.wire import ENGINE_CORE_DEAD, MessageType, Stamp, pack, unpack

TOKEN = b"t" * 16
CORE = Stamp(TOKEN, 0, 1)
encode = msgspec.msgpack.encode


def channel() -> CoreChannel:
    made = CoreChannel(Stamp(TOKEN, 5, 1))
    made.incarnation = 1
    return made


def test_requests_are_addressed_stamped_and_marked_with_the_client() -> None:
    identity, head, payload = channel().add(EngineCoreRequest("r", [1, 2], SamplingParams(seed=3)))
    assert identity == b"\x00\x00"
    header = CORE.read(head)
    assert (header.type, header.sender) == (MessageType.ADD, 5)
    decoded = msgspec.msgpack.decode(payload, type=EngineCoreRequest)
    assert (decoded.request_id, decoded.client_index, decoded.params.seed) == ("r", 5, 3)


def test_a_utility_call_carries_its_id_and_its_client() -> None:
    _, head, payload = channel().utility(7, "reset_prefix_cache", utility_args("reset_prefix_cache", None, {}))
    call = msgspec.msgpack.decode(payload, type=UtilityCall)
    assert CORE.read(head).type is MessageType.UTILITY
    assert (call.call_id, call.client_index, call.verb, unpack(call.args)) == (7, 5, "reset_prefix_cache", {})


def test_outputs_and_death_are_read() -> None:
    reader = channel()
    message = reader.read([CORE.header(MessageType.OUTPUTS), encode(EngineCoreOutputs(timestamp=2.5))])
    assert isinstance(message, EngineCoreOutputs) and message.timestamp == 2.5
    death = EngineDeath(0, 1, "out of luck")
    assert reader.read([CORE.header(MessageType.DEAD), ENGINE_CORE_DEAD, encode(death)]) == death
    assert reader.num_dropped == 0


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [CORE.header(MessageType.OUTPUTS)],
        [Stamp(b"x" * 16, 0, 1).header(MessageType.OUTPUTS), encode(EngineCoreOutputs())],
        [Stamp(TOKEN, 1, 1).header(MessageType.OUTPUTS), encode(EngineCoreOutputs())],
        [Stamp(TOKEN, 0, 2).header(MessageType.OUTPUTS), encode(EngineCoreOutputs())],
        [CORE.header(MessageType.OUTPUTS), b"\xff\xff"],
        [CORE.header(MessageType.OUTPUTS), b""],
        [CORE.header(MessageType.OUTPUTS), encode({"no": "array"})],
        [CORE.header(MessageType.DEAD), b"SOMETHING ELSE", encode(EngineDeath(0, 1, "x"))],
        [CORE.header(MessageType.DEAD), ENGINE_CORE_DEAD, b"\xc1"],
        [CORE.header(MessageType.ADD), encode(EngineCoreOutputs())],
        [CORE.header(MessageType.OUTPUTS), encode(EngineCoreOutputs()), b"", b""],
    ],
)
def test_what_is_not_the_cores_is_dropped_and_counted(frames: list[bytes]) -> None:
    reader = channel()
    assert reader.read(frames) is None
    assert reader.num_dropped == 1


def test_greetings_are_no_news_and_strangers_are_counted() -> None:
    reader = channel()
    reader.check([b"\x00\x00", CORE.header(MessageType.HELLO), b""])
    assert reader.num_dropped == 0
    reader.check([b"\x00\x00", b"hello"])
    reader.check([b"\x00\x00"])
    assert reader.num_dropped == 2


def test_replies_reach_their_caller_in_any_order() -> None:
    calls = UtilityCalls()
    (first, one), (second, two), (third, three) = calls.open(), calls.open(), calls.open()
    calls.resolve(UtilityReply(second, pack({"a": [1]})))
    calls.resolve(UtilityReply(first, failure="no"))
    calls.resolve(UtilityReply(third, msgspec.Raw(b"\xc1")))
    calls.resolve(UtilityReply(99, pack(1)))
    assert two.result(0) == {"a": [1]}
    for future, words in ((one, "no"), (three, "cannot be read")):
        with pytest.raises(UtilityError, match=words):
            future.result(0)


def test_a_late_reply_to_a_forgotten_call_is_ignored() -> None:
    calls = UtilityCalls()
    call_id, future = calls.open()
    calls.forget(call_id)
    calls.resolve(UtilityReply(call_id, pack(1)))
    assert not future.done()


def test_death_fails_calls_that_wait_and_calls_to_come() -> None:
    calls = UtilityCalls()
    waiting = [calls.open()[1] for _ in range(3)]
    calls.fail(EngineDeadError("gone"))
    waiting.append(calls.open()[1])
    for future in waiting:
        with pytest.raises(EngineDeadError, match="gone"):
            future.result(0)


def test_death_while_others_call_leaves_nobody_waiting() -> None:
    calls = UtilityCalls()
    futures: list[Future[Any]] = []

    def call() -> None:
        for _ in range(500):
            futures.append(calls.open()[1])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    calls.fail(EngineDeadError("gone"))
    for thread in threads:
        thread.join()
    assert len(futures) == 2000 and all(future.done() for future in futures)


@pytest.mark.parametrize(
    ("verb", "args", "words"),
    [
        ("no_such_verb", {}, "no control verb 'no_such_verb'"),
        ("__class__", {}, "no control verb"),
        ("is_paused", {"surprise": 1}, "takes no arguments, not surprise"),
        ("abort_requests", {"request_ids": object()}, "cannot be sent"),
    ],
)
def test_a_call_that_cannot_work_is_refused_here(verb: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(UtilityError, match=words):
        utility_args(verb, None, args)


def test_the_timeout_travels_where_the_verb_has_one() -> None:
    assert unpack(utility_args("collective_rpc", 2.0, {"method": "m", "args": [1]})) == {
        "method": "m",
        "args": [1],
        "timeout": 2.0,
    }


def test_why_a_core_is_dead() -> None:
    ready, dead = Member(0, 1, "READY"), Member(0, 1, "DEAD", reason="it was killed")
    assert fault_of(Membership([ready]), None) is None
    assert str(fault_of(Membership([dead]), None)) == "it was killed"
    assert str(fault_of(Membership([ready]), EngineStartError("elsewhere"))) == "elsewhere"
    assert fault_of(Membership([Member(3, 1, "DEAD", reason="another's")]), None) is None
