"""A ResponseForm, and the items of what came before it, to a ChatForm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evensong.entrypoints.http.responses.conversation import messages_of
from evensong.entrypoints.http.responses.forms import INCLUDABLE, LOGPROBS, ResponseForm
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.translated import chat_form, check_form, text_of
from evensong.protocol.errors import RequestError

# The fields of a ChatForm as they are called here.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
_CHOICES = ("none", "auto", "required")
_FORMATS = ("text", "json_object", "json_schema")


def input_items(form: ResponseForm) -> list[dict[str, Any]]:
    """The input as items. Raises RequestError for one that says nothing."""
    if not form.input:
        raise RequestError("input must not be empty", param="input")
    if isinstance(form.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": form.input}]}]
    return form.input


def translate(form: ResponseForm, earlier: Sequence[dict[str, Any]], items: Sequence[dict[str, Any]]) -> ChatForm:
    """The chat that a response continues: `earlier` items, then those of the request.

    Raises RequestError naming the field of the Responses API that cannot be.
    """
    check_form(form)
    _check_settings(form)
    fields = form.passed() | {
        "messages": messages_of([*earlier, *items], len(earlier), form.instructions),
        "max_completion_tokens": form.max_output_tokens,
        "stream": bool(form.stream or form.background),
        "stop": form.stop,
        "parallel_tool_calls": form.parallel_tool_calls is not False,
    }
    if form.user is not None:
        fields["user"] = form.user
    if form.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(form.tools)]
    if form.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(form.tool_choice)
    if form.reasoning is not None and form.reasoning.effort is not None:
        fields["reasoning_effort"] = form.reasoning.effort
    if form.text is not None and form.text.format is not None:
        fields["response_format"] = _format(form.text.format)
    if LOGPROBS in (form.include or ()):
        fields |= {"logprobs": True, "top_logprobs": form.top_logprobs or 0}
    return chat_form(fields, NAMES)


def _check_settings(form: ResponseForm) -> None:
    for name in form.include or ():
        if name not in INCLUDABLE:
            raise RequestError(f"include: {name!r:.60} is not one of {', '.join(INCLUDABLE)}", param="include")
    if form.truncation == "auto":
        raise RequestError("truncation 'auto' is not supported: no item is dropped here", param="truncation")
    if form.max_output_tokens is not None and form.max_output_tokens < 1:
        raise RequestError(
            f"max_output_tokens must be at least 1, got {form.max_output_tokens}", param="max_output_tokens"
        )
    if form.top_logprobs is not None and form.top_logprobs < 0:
        raise RequestError(f"top_logprobs must not be negative, got {form.top_logprobs}", param="top_logprobs")
    metadata = form.metadata or {}
    long = any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items())
    if len(metadata) > MAX_METADATA or long:
        raise RequestError(
            f"metadata may hold {MAX_METADATA} keys of {MAX_KEY} characters with values of {MAX_VALUE}",
            param="metadata",
        )
    if form.background and form.store is False:
        raise RequestError("background needs store", param="background")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type {tool.get('type')!r:.60} is not supported: this server runs no tools, and knows only "
            "those of type 'function'",
            param=where,
        )
    function = {"name": text_of(tool.get("name"), f"{where}.name")}
    function |= {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise RequestError(f"tool_choice must be one of {', '.join(_CHOICES)}, or a function", param="tool_choice")
        return choice
    if choice.get("type") != "function":
        raise RequestError(f"tool_choice of type {choice.get('type')!r:.60} is not supported", param="tool_choice")
    return {"type": "function", "function": {"name": text_of(choice.get("name"), "tool_choice.name")}}


def _format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in _FORMATS:
        raise RequestError(f"text.format.type must be one of {', '.join(_FORMATS)}", param="text.format")
    if kind != "json_schema":
        return {"type": kind}
    schema = {key: given[key] for key in ("name", "description", "schema", "strict") if given.get(key) is not None}
    return {"type": kind, "json_schema": schema}
