"""Headers and payloads on the sockets: what is not of this launch, or no message at all, is refused."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from evensong.protocol.errors import ErrorBody, RequestError
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs
from evensong.protocol.wire import (
    HEADER_BYTES,
    TOKEN_BYTES,
    BadMessage,
    Codec,
    Header,
    MessageType,
    Stamp,
    engine_identity,
    pack,
    unpack,
)

TOKEN = bytes(range(TOKEN_BYTES))
STAMP = Stamp(TOKEN, sender=3, incarnation=70000)


@pytest.mark.parametrize("kind", MessageType)
def test_a_header_comes_back_as_it_went(kind: MessageType) -> None:
    frame = STAMP.header(kind)
    assert len(frame) == HEADER_BYTES
    assert Stamp(TOKEN, 0, 0).read(memoryview(frame)) == Header(kind, 3, 70000)


def test_headers_of_others_are_refused() -> None:
    frame = STAMP.header(MessageType.ADD)
    other_version = frame[:16] + b"\x09\x00" + frame[18:]
    unknown_type = frame[:18] + b"\xee" + frame[19:]
    for bad in (b"", frame[:-1], frame + b"\0", b"\xff" + frame[1:], other_version, unknown_type):
        with pytest.raises(BadMessage):
            STAMP.read(bad)


def test_random_bytes_are_never_a_header() -> None:
    rng = random.Random(5)
    for _ in range(300):
        with pytest.raises(BadMessage):
            STAMP.read(rng.randbytes(HEADER_BYTES))


def test_outputs_survive_the_wire_whole() -> None:
    codec = Codec(EngineCoreOutputs)
    full = EngineCoreOutput(
        "r", 2, 7, [1, 2], [TokenLogprobs([1], [-0.5], 1)] * 2, FinishReason.STOP, "end", 16, ErrorBody("why", 500), 1.5
    )
    message = EngineCoreOutputs(1, 2, [full], [Admission("r", 2, 16)], timestamp=3.0)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", os.urandom(40) + b"\xc1", b"\x91" * 5000, b"\xa1\xff"])
def test_what_is_no_record_is_a_bad_message(payload: bytes) -> None:
    with pytest.raises(BadMessage, match="undecodable"):
        Codec(EngineCoreOutputs).decode(payload)


def test_plain_values_and_identities() -> None:
    value = {"a": [1, 2.5, None, "x", b"y"]}
    assert unpack(pack(value)) == value
    with pytest.raises(TypeError):
        pack(object())
    assert engine_identity(258) == b"\x02\x01"


def test_a_refusal_keeps_everything_that_http_needs() -> None:
    error = RequestError("no", status=429, type="rate_limit_error", param="n", code="queue_full", retry_after=2)
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(error.body()), type=ErrorBody)
    again = RequestError.from_body(body)
    assert again.body() == error.body() and str(again) == "no" and isinstance(again, ValueError)
