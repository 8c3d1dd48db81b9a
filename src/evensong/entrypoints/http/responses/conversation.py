"""Items of the Responses API to the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evensong.engine.frontend.chat_messages import MAX_MESSAGES
from evensong.entrypoints.http.translated import object_at, text_of
from evensong.protocol.errors import RequestError

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
Message = dict[str, Any]


def messages_of(items: Sequence[Any], num_earlier: int, instructions: str | None) -> list[Message]:
    """The conversation of `items`, of which the first `num_earlier` come from earlier responses.

    System messages at its head become one, for templates know one: the instructions first. Raises RequestError for
    what cannot be, among it a call without its output and an output without its call.
    """
    if len(items) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} items are allowed, got {len(items)}", param="input")
    conversation = _Conversation()
    if instructions:
        conversation.say({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        place = index - num_earlier
        conversation.add(item, f"input[{place}]" if place >= 0 else "previous_response_id")
    return conversation.ended()


class _Conversation:
    """Messages in the making. What one assistant turn holds is one message: reasoning, text, calls."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning = ""
        self._waiting: dict[str, str] = {}  # id of a call without its output -> where it stands
        self._known_calls: set[str] = set()
        self._kinds: dict[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._call_output,
            "reasoning": self._reasons,
        }

    def add(self, item: object, where: str) -> None:
        """One item."""
        fields = object_at(item, where)
        kind = fields.get("type") or "message"
        handle = self._kinds.get(kind) if isinstance(kind, str) else None
        if handle is None:
            known = ", ".join(self._kinds)
            raise RequestError(f"{where}.type {kind!r:.60} is not supported; items are {known}", param=where)
        handle(fields, where)

    def say(self, message: Message) -> None:
        """One message; system messages at the head are merged."""
        head = self._messages
        if message["role"] == "system" and len(head) == 1 and head[0]["role"] == "system":
            head[0]["content"] += "\n\n" + message["content"]
        else:
            self._messages.append(message)

    def ended(self) -> list[Message]:
        """All messages, once every item is there."""
        for call_id, where in self._waiting.items():
            raise RequestError(f"no output was found for the function call {call_id!r:.80} of {where}", param=where)
        return self._messages

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
        message: Message = {"role": _ROLES[role], "content": content_text(item.get("content"), f"{where}.content")}
        if role == "assistant":
            message |= self._taken_reasoning()
        self.say(message)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        call_id = text_of(item.get("call_id"), f"{where}.call_id")
        name = text_of(item.get("name"), f"{where}.name")
        arguments = text_of(item.get("arguments"), f"{where}.arguments")
        if call_id in self._known_calls:
            raise RequestError(f"{where}.call_id {call_id!r:.80} comes twice", param=f"{where}.call_id")
        self._known_calls.add(call_id)
        self._waiting[call_id] = where
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            last = {"role": "assistant", "content": "", **self._taken_reasoning()}
            self._messages.append(last)
        function = {"name": name, "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _call_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = text_of(item.get("call_id"), f"{where}.call_id")
        if self._waiting.pop(call_id, None) is None:
            raise RequestError(
                f"{where}.call_id: no function call {call_id!r:.80} waits for an output", param=f"{where}.call_id"
            )
        content = content_text(item.get("output"), f"{where}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _reasons(self, item: Mapping[str, Any], where: str) -> None:
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.content must be a list", param=f"{where}.content")
        for part in parts:
            self._reasoning += text_of(object_at(part, f"{where}.content").get("text"), f"{where}.content")

    def _taken_reasoning(self) -> Message:
        taken, self._reasoning = self._reasoning, ""
        return {"reasoning_content": taken} if taken else {}


def content_text(content: object, where: str) -> str:
    """The text of a content: a string, or text parts, which are lines of their own as in chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise RequestError(f"{where} holds a part of type {kind!r:.40}; only text is supported", param=where)
        texts.append(text_of(part.get("text"), where))
    return "\n".join(texts)
