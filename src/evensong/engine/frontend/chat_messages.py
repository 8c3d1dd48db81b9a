"""The messages of a conversation, checked and in the form that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from evensong.protocol.errors import RequestError
from evensong.protocol.text import has_lone_surrogate

MAX_MESSAGES = 4096
MAX_CALLS = 128
# Texts of a message beside its content. An assistant's reasoning has had both names.
_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content")


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
    calls = _check_calls(f"{where}.tool_calls", message.get("tool_calls")) if role == "assistant" else []
    content = message.get("content")
    if isinstance(content, list):
        # Parts are lines of their own, as vLLM joins them.
        content = "\n".join(_text_part(part, where) for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    texts = {key: message[key] for key in _TEXTS if message.get(key) is not None}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise RequestError(f"{where}.{key} must be a string", param=f"{where}.{key}")
    for text in (role, content, *texts.values()):
        if has_lone_surrogate(text):
            raise RequestError(f"{where} holds a lone surrogate, which no UTF-8 can hold", param=where)
    for feature in ("function_call", "audio", *(() if role == "assistant" else ("tool_calls",))):
        if message.get(feature):
            raise RequestError(f"{where}.{feature} is not supported", param=f"{where}.{feature}")
    # Templates read it under the second name.
    if "reasoning" in texts:
        texts.setdefault("reasoning_content", texts.pop("reasoning"))
    checked = {"role": role, "content": content, **{key: text for key, text in texts.items() if text}}
    return {**checked, "tool_calls": calls} if calls else checked


def _check_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Calls that an assistant made, with arguments as an object: the form that templates are written for."""
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)) or len(calls) > MAX_CALLS:
        raise RequestError(f"{where} must be a list of at most {MAX_CALLS} calls", param=where)
    return [_check_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _check_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"{where} must be a call of type function", param=where)
    call_id, name, text = call.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a string", param=f"{where}.function.name")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{where}.id must be a string", param=f"{where}.id")
    arguments = _arguments(f"{where}.function.arguments", text)
    shown = json.dumps([call_id, name, arguments], ensure_ascii=False)
    if has_lone_surrogate(shown):
        raise RequestError(f"{where} holds a lone surrogate, which no UTF-8 can hold", param=where)
    names = {} if call_id is None else {"id": call_id}
    return {**names, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(where: str, text: object) -> dict[str, Any]:
    """The JSON object in `text`. Raises RequestError for anything else."""
    if not isinstance(text, str):
        raise RequestError(f"{where} must be a string that holds a JSON object", param=where)
    try:
        # Calls without arguments come with an empty text from some clients.
        value = json.loads(text or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is no JSON: {error}", param=where) from error
    if not isinstance(value, dict):
        raise RequestError(f"{where} must hold a JSON object", param=where)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _text_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.content holds a part of type {kind!r:.40}; only text is supported", param=where)
    return str(part["text"])
