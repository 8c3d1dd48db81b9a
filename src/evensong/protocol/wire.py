"""Frames on the sockets between front ends and cores.

Requests: front end ROUTER -> core DEALER: [identity] [header] [payload].
Outputs: core PUSH -> front end PULL: [header] [payload].
Handshake: launcher ROUTER <-> DEALER of every child: [identity] [header] [payload].

The header is 16 bytes of launch token, protocol version, message type, sender and incarnation. A message whose token
or version differs is dropped and counted. Payloads are msgpack (msgspec), never pickle.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec

PROTOCOL_VERSION = 1
TOKEN_BYTES = 16
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

_HEADER = struct.Struct("<16sHBxHxxI")
HEADER_BYTES = _HEADER.size


class MessageType(IntEnum):
    """What a payload is. Names are the field's; numbers never change within a protocol version."""

    ADD = 0
    ABORT = 1
    START_DP_WAVE = 2
    UTILITY = 3
    OUTPUTS = 16
    DEAD = 17
    HELLO = 32
    INIT = 33
    READY = 34
    FAILED = 35
    MEMBERSHIP = 36
    SHUTDOWN = 37


class Header(msgspec.Struct, frozen=True):
    """Who sent a message, in which life. `sender` is an engine or client index."""

    type: MessageType
    sender: int
    incarnation: int


class BadMessage(Exception):
    """A frame that is not ours or cannot be decoded; it is dropped and counted, never obeyed."""


class Stamp:
    """Writes and checks headers for one sender of one launch."""

    def __init__(self, token: bytes, sender: int, incarnation: int) -> None:
        assert len(token) == TOKEN_BYTES
        self.token = token
        self.sender = sender
        self.incarnation = incarnation

    def header(self, type: MessageType) -> bytes:
        """The header of a message of this sender."""
        return _HEADER.pack(self.token, PROTOCOL_VERSION, type, self.sender, self.incarnation)

    def read(self, frame: bytes | memoryview) -> Header:
        """The header in `frame`; raises BadMessage when it is not of this launch and protocol."""
        if len(frame) != HEADER_BYTES:
            raise BadMessage(f"header of {len(frame)} bytes, expected {HEADER_BYTES}")
        token, version, type_number, sender, incarnation = _HEADER.unpack(frame)
        if token != self.token:
            raise BadMessage("launch token of another launch")
        if version != PROTOCOL_VERSION:
            raise BadMessage(f"protocol version {version}, expected {PROTOCOL_VERSION}")
        try:
            return Header(MessageType(type_number), sender, incarnation)
        except ValueError:
            raise BadMessage(f"unknown message type {type_number}") from None


def engine_identity(index: int) -> bytes:
    """The ROUTER identity of a core: its index, 2 bytes, little endian (spec B1)."""
    return index.to_bytes(2, "little")


T = TypeVar("T")


class Codec(Generic[T]):
    """msgpack encoder and decoder of one record type; not thread-safe: one instance a thread."""

    def __init__(self, record: type[T]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(record)

    def encode(self, value: T) -> bytes:
        """`value` as msgpack; raises TypeError or ValueError for what msgpack cannot hold."""
        return self._encoder.encode(value)

    def decode(self, payload: bytes | memoryview) -> T:
        """The record in `payload`; raises BadMessage."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError) as error:
            raise BadMessage(f"undecodable payload: {error}") from error


def pack(value: Any) -> msgspec.Raw:
    """Any plain value as a raw msgpack field; raises TypeError for what msgpack cannot hold."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


def unpack(raw: msgspec.Raw | bytes) -> Any:
    """The plain value in a raw msgpack field."""
    return msgspec.msgpack.decode(raw)
