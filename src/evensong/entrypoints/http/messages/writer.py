"""MessageWriter: what a turn says to the content blocks and events of one message."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from evensong.entrypoints.http.forms_out import Usage
from evensong.entrypoints.http.said import Piece, Said
from evensong.protocol.errors import RequestError

Event = dict[str, Any]


class MessageWriter:
    """One message in the making, whole and in events. `max_tokens` is what the request allowed."""

    def __init__(self, frame: dict[str, Any], max_tokens: int) -> None:
        self._message: dict[str, Any] = {**frame, "content": [], "stop_reason": None, "stop_sequence": None}
        self._max_tokens = max_tokens
        self._block: Piece | None = None
        self._opened = False

    def message(self) -> dict[str, Any]:
        """The message as it is now; of a block that is not closed nothing is in it."""
        return {**self._message, "content": list(self._message["content"])}

    def add(self, said: Said) -> list[Event]:
        """The events of what is new. Raises RequestError where the engine ended it early."""
        events: list[Event] = []
        self._message["usage"] = usage_form(said.usage)
        if not self._opened:
            self._opened = True
            # How many come is not known yet.
            start = self.message() | {"usage": {**usage_form(said.usage), "output_tokens": 0}}
            events += [{"type": "message_start", "message": start}, {"type": "ping"}]
        for piece in said.pieces:
            events += self._piece(piece)
        if said.finish_reason is not None:
            events += self._end(said)
        return events

    @property
    def _index(self) -> int:
        return len(self._message["content"])

    def _piece(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        block = self._block
        if block is None or block.kind != piece.kind or (piece.call is not None and piece.call.name is not None):
            events += self._close()
            self._block = block = Piece(piece.kind, "", piece.call)
            events.append({"type": "content_block_start", "index": self._index, "content_block": _empty(piece)})
        block.text += piece.text
        if piece.text:
            events.append({"type": "content_block_delta", "index": self._index, "delta": _delta(piece)})
        return events

    def _close(self) -> list[Event]:
        block, self._block = self._block, None
        if block is None:
            return []
        event = {"type": "content_block_stop", "index": self._index}
        self._message["content"].append(_whole(block))
        return [event]

    def _end(self, said: Said) -> list[Event]:
        reason, sequence = self._stop_reason(said)
        self._message |= {"stop_reason": reason, "stop_sequence": sequence}
        events = self._close()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": usage_form(said.usage)},
            {"type": "message_stop"},
        ]

    def _stop_reason(self, said: Said) -> tuple[str, str | None]:
        if said.finish_reason == "length":
            full = said.usage.completion_tokens < self._max_tokens
            return ("model_context_window_exceeded" if full else "max_tokens"), None
        if said.finish_reason != "stop":
            # The API has no reason that says so.
            status = 503 if said.finish_reason == "abort" else 500
            raise RequestError(f"the message was ended early ({said.finish_reason})", status=status, type="api_error")
        if isinstance(said.stop_reason, str):
            return "stop_sequence", said.stop_reason
        blocks = [block["type"] for block in self._message["content"]]
        called = "tool_use" in blocks or (self._block is not None and self._block.kind == "call")
        return ("tool_use" if called else "end_turn"), None


def usage_form(usage: Usage) -> dict[str, Any]:
    """The usage object of a message: tokens from the cache are not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _empty(piece: Piece) -> dict[str, Any]:
    if piece.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if piece.kind == "content":
        return {"type": "text", "text": ""}
    call = piece.call
    return {"type": "tool_use", "id": call and call.id, "name": call and call.name, "input": {}}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    if piece.kind == "content":
        return {"type": "text_delta", "text": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}


def _whole(block: Piece) -> dict[str, Any]:
    form = _empty(block)
    if block.kind == "call":
        return form | {"input": _input(block.text)}
    return form | {"thinking" if block.kind == "reasoning" else "text": block.text}


def _input(arguments: str) -> Any:
    """The arguments of a call as they were written; of a call that was cut there is no object to give."""
    try:
        json.loads(arguments)
    except ValueError:
        return {}
    return msgspec.Raw(arguments.encode())
