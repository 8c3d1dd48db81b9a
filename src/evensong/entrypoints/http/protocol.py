"""Uvicorn's HTTP protocol with limits on headers, and this server's form of error where no route is reached."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from evensong.entrypoints.http.errors import error_body
from evensong.entrypoints.http.streaming import BODY_WRITER

MAX_HEADER_BYTES = 64 * 1024
# What a client that was refused may still send, and how long, before its connection is closed.
LINGER_BYTES = 1 << 20
LINGER_SECONDS = 1.0


class Protocol(HttpToolsProtocol):
    """One connection. `seconds`: how long the headers of a request may take, 0 for ever."""

    seconds = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._headers_due: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._in_message = False
        self._num_header_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._num_ignored_bytes: int | None = None  # after a refusal

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """A client connects; it is expected to say something."""
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; a header block that never ends is refused."""
        if self._num_ignored_bytes is not None:
            self._num_ignored_bytes += len(data)
            if self._num_ignored_bytes > LINGER_BYTES:
                self.transport.close()
            return
        super().data_received(data if self._in_message else without_upgrade(data))
        if self._in_headers and self.parser is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_headers, self._in_message, self._num_header_bytes = True, True, 0
        if self._headers_due is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        """The headers are there."""
        self._stop_clock()
        self._in_headers = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refusal = (431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
            raise ValueError(self._refusal[1])  # the parser stops, and send_400_response is called
        super().on_headers_complete()
        # The application's task has not run yet.
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # the type knows no extensions of others
        scope.setdefault("extensions", {})[BODY_WRITER] = CycleWriter(self.cycle)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._in_message = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser cannot read gets an OpenAI error, not plain text."""
        self._refuse(*(self._refusal or (400, "this is no valid HTTP request")))

    def _refuse(self, status: int, message: str) -> None:
        self._stop_clock()
        # Behind an answer that is still being written it would be read as a part of that.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(error_body(message, "invalid_request_error", code=_CODES[status])).encode()
            head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._linger()

    def _linger(self) -> None:
        """Ends the connection, once the client has stopped sending or had its time.

        Of one that is closed with bytes unread the system lets the client know by a reset, which may overtake the
        answer (RFC 9112, section 9.6).
        """
        if not self.transport.can_write_eof():  # over TLS
            self.transport.close()
            return
        self._num_ignored_bytes = 0
        self.transport.write_eof()
        self._headers_due = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _expect_headers(self) -> None:
        if self.seconds:
            self._headers_due = self.loop.call_later(self.seconds, self._headers_late)

    def _headers_late(self) -> None:
        self._headers_due = None
        if not self.transport.is_closing():
            if self._in_headers:
                self._refuse(408, f"the headers did not come within {self.seconds:g} s")
            else:
                self.transport.close()

    def _stop_clock(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class CycleWriter:
    """The BodyWriter (streaming.py) of one response: chunks go to the transport, as the cycle's own `send` has them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, body: bytes) -> bool:
        """Writes a chunk, or drops it where the client is gone; False while it does not keep up."""
        cycle = self._cycle
        assert cycle.chunked_encoding and not cycle.response_complete, "a body is written before its status line"
        if cycle.flow.write_paused and not cycle.disconnected:
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    async def drain(self) -> None:
        """Until the client has caught up, or is gone."""
        await self._cycle.flow.drain()


def without_upgrade(data: bytes) -> bytes:
    """The first bytes of a request without its offer to speak another protocol, which may always be declined.

    Java's client makes one with every request, and the parser takes what follows such headers for that protocol.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + rest if end and b"pgrade" in head else data


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_CODES = {400: "bad_request", 408: "request_timeout", 431: "headers_too_large"}


def protocol_class(seconds: float) -> type[Protocol]:
    """The protocol with a limit of its own."""
    return type("LimitedProtocol", (Protocol,), {"seconds": seconds})
