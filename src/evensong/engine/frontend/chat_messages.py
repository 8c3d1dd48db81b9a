"""The messages of a conversation, checked and in the form that chat templates are written for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evensong.protocol.errors import RequestError
from evensong.protocol.text import has_lone_surrogate

MAX_MESSAGES = 4096


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Role, text and names of each message. Raises RequestError naming what a template cannot be given."""
    return [_check_message(index, message) for index, message in enumerate(_check_list(messages))]


def _check_list(messages: object) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)):
        raise RequestError("messages must be a list", param="messages")
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} messages are allowed, got {len(messages)}", param="messages")
    return messages


def _check_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        # Parts are lines of their own, as vLLM joins them.
        content = "\n".join(_text_part(part, where) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    name, call_id = message.get("name"), message.get("tool_call_id")
    for key, text in (("name", name), ("tool_call_id", call_id)):
        if text is not None and not isinstance(text, str):
            raise RequestError(f"{where}.{key} must be a string", param=f"{where}.{key}")
    for text in (role, content, name or "", call_id or ""):
        if has_lone_surrogate(text):
            raise RequestError(f"{where} holds a lone surrogate, which no UTF-8 can hold", param=where)
    for feature in ("tool_calls", "function_call", "audio"):
        if message.get(feature):
            raise RequestError(f"{where}.{feature} is not supported yet", param=f"{where}.{feature}")
    names = {key: text for key, text in (("name", name), ("tool_call_id", call_id)) if text}
    return {"role": role, "content": content, **names}


def _text_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.content holds a part of type {kind!r:.40}; only text is supported", param=where)
    return str(part["text"])
