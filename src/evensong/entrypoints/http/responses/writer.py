"""ResponseWriter: what a turn says to the items and events of one response.

Whole and streamed responses are made by the same writer, so the last event of a stream holds what the whole one is.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping
from typing import Any

from evensong.entrypoints.http.forms_out import Usage
from evensong.entrypoints.http.parsers.base import ToolCallDelta
from evensong.entrypoints.http.said import Piece, Said

Event = dict[str, Any]
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
# What ended the engine's request -> the response's status, and its last event.
_ENDINGS = {
    "stop": ("completed", "response.completed"),
    "length": ("incomplete", "response.incomplete"),
    # The API has no event of its own for these two.
    "abort": ("cancelled", "response.incomplete"),
    "error": ("failed", "response.failed"),
}


class ResponseWriter:
    """One response in the making. `frame` holds the fields that are known from its beginning."""

    def __init__(self, frame: Mapping[str, Any], name: str) -> None:
        self._response: dict[str, Any] = {**frame, "status": "in_progress", "output": [], "usage": None}
        self._name = name
        self._item: _Item | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back
        self._num_events = 0
        self.ended = False

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return {**self._response, "output": list(self._response["output"])}

    def opened(self) -> list[Event]:
        """The events before anything is said."""
        return [self._event(f"response.{kind}", response=self.response()) for kind in ("created", "in_progress")]

    def add(self, said: Said) -> list[Event]:
        """The events of what is new; the last ones, where it ends here."""
        events: list[Event] = []
        self._logprobs += said.logprobs
        self._response["usage"] = usage_form(said.usage)
        for piece in said.pieces:
            events += self._piece(piece)
        if said.finish_reason is not None:
            if not self._response["output"] and self._item is None:
                events += self._begin(Piece("content", ""))
            events += self._end(said.finish_reason)
        return events

    def cancelled(self) -> list[Event]:
        """The last events of a response that is not wanted any more."""
        return self._end("abort")

    def failed(self, status: int, error: Mapping[str, Any]) -> list[Event]:
        """The last events of a response that the engine could not finish; `error` as in an OpenAI error body."""
        self._response["error"] = {"code": _CODES.get(status, "server_error"), "message": error["message"]}
        return self._end("error")

    def _piece(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if self._item is None or not self._item.holds(piece):
            events += self._close("completed")
            events += self._begin(piece)
        assert self._item is not None
        if piece.text:
            logprobs = self._take_logprobs() if piece.kind == "content" else None
            events += [self._event(**event) for event in self._item.grow(piece.text, logprobs)]
        return events

    def _take_logprobs(self) -> list[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _begin(self, piece: Piece) -> list[Event]:
        index = len(self._response["output"])
        self._item = make_item(piece, index, self._name)
        return [self._event(**event) for event in self._item.opened()]

    def _close(self, status: str) -> list[Event]:
        item, self._item = self._item, None
        if item is None:
            return []
        # Log-probabilities of tokens without text, such as the one that ends a turn.
        events = [self._event(**event) for event in item.closed(status, self._take_logprobs())]
        self._response["output"].append(item.form)
        return events

    def _end(self, reason: str) -> list[Event]:
        if self.ended:
            return []
        self.ended = True
        status, kind = _ENDINGS.get(reason, _ENDINGS["error"])
        events = self._close("completed" if status == "completed" else "incomplete")
        self._response["status"] = status
        if reason == "length":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            self._response["completed_at"] = int(time.time())
        if status == "failed" and self._response["error"] is None:
            self._response["error"] = {"code": "server_error", "message": "the engine could not finish the response"}
        return [*events, self._event(kind, response=self.response())]

    def _event(self, type: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": type, "sequence_number": self._num_events - 1, **fields}


class _Item(abc.ABC):
    """An output item in the making; its events bear no sequence numbers yet."""

    kind = ""

    def __init__(self, form: dict[str, Any], index: int) -> None:
        self.form = form
        self._index = index
        self._text = ""

    def holds(self, piece: Piece) -> bool:
        """Whether a piece belongs to this item."""
        return piece.kind == self.kind

    def opened(self) -> list[Event]:
        """The item is there, and empty."""
        return [self._of_item("response.output_item.added")]

    @abc.abstractmethod
    def grow(self, text: str, logprobs: list[dict[str, Any]] | None) -> list[Event]:
        """More text."""

    @abc.abstractmethod
    def closed(self, status: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """The item is complete, or cut."""

    def _of_item(self, type: str) -> Event:
        return {"type": type, "output_index": self._index, "item": _copy(self.form)}

    def _inside(self, type: str, **fields: Any) -> Event:
        return {"type": type, "item_id": self.form["id"], "output_index": self._index, **fields}

    def _done(self, status: str) -> Event:
        self.form["status"] = status
        return self._of_item("response.output_item.done")


class _TextItem(_Item):
    """A message, or reasoning: an item with one part of text."""

    part_type = ""
    events = ""

    def opened(self) -> list[Event]:
        """The item, and its part."""
        return [*super().opened(), self._inside("response.content_part.added", content_index=0, part=self._part())]

    def grow(self, text: str, logprobs: list[dict[str, Any]] | None) -> list[Event]:
        """A delta of the text."""
        self._text += text
        delta = self._inside(f"response.{self.events}.delta", content_index=0, delta=text)
        return [delta | self._more(logprobs or [])]

    def closed(self, status: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """The text is known."""
        done = self._inside(f"response.{self.events}.done", content_index=0, text=self._text)
        done |= self._more(logprobs, whole=True)
        part = self._part()
        self.form["content"] = [part]
        return [done, self._inside("response.content_part.done", content_index=0, part=part), self._done(status)]

    def _part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self._text}

    def _more(self, logprobs: list[dict[str, Any]], *, whole: bool = False) -> dict[str, Any]:
        return {}


class _Reasoning(_TextItem):
    kind, part_type, events = "reasoning", "reasoning_text", "reasoning_text"


class _Message(_TextItem):
    kind, part_type, events = "content", "output_text", "output_text"

    def __init__(self, form: dict[str, Any], index: int) -> None:
        super().__init__(form, index)
        self._logprobs: list[dict[str, Any]] = []

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "annotations": [], "logprobs": list(self._logprobs)}

    def _more(self, logprobs: list[dict[str, Any]], *, whole: bool = False) -> dict[str, Any]:
        self._logprobs += logprobs
        return {"logprobs": list(self._logprobs) if whole else logprobs}


class _Call(_Item):
    kind = "call"

    def holds(self, piece: Piece) -> bool:
        """Only what follows of the same call."""
        return piece.kind == self.kind and (piece.call is None or piece.call.name is None)

    def grow(self, text: str, logprobs: list[dict[str, Any]] | None) -> list[Event]:
        """A delta of the arguments."""
        self._text += text
        return [self._inside("response.function_call_arguments.delta", delta=text)]

    def closed(self, status: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """The arguments are known."""
        self.form["arguments"] = self._text
        name = self.form["name"]
        done = self._inside("response.function_call_arguments.done", name=name, arguments=self._text)
        return [done, self._done(status)]


def make_item(piece: Piece, index: int, name: str) -> _Item:
    """The item that a piece begins. Its id has the response's `name` in it, so that the response can be found by it."""
    common: dict[str, Any] = {"status": "in_progress"}
    if piece.kind == "reasoning":
        form = {"id": f"rs_{name}_{index}", "type": "reasoning", "summary": [], "content": [], **common}
        return _Reasoning(form, index)
    if piece.kind == "content":
        form = {"id": f"msg_{name}_{index}", "type": "message", "role": "assistant", "content": [], **common}
        return _Message(form, index)
    call = piece.call or ToolCallDelta(0, None, None, "")
    form = {"id": f"fc_{name}_{index}", "type": "function_call", "call_id": call.id, "name": call.name}
    return _Call({**form, "arguments": "", **common}, index)


def usage_form(usage: Usage) -> dict[str, Any]:
    """The usage object of a response; reasoning is among the output tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _copy(form: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in form.items()}
