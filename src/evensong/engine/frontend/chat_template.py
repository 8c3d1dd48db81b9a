"""Chat messages to prompt text, with the model's own Jinja template in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evensong.protocol.errors import RequestError

MAX_MESSAGES = 4096
MAX_CHARACTERS = 64 * 1024 * 1024


class ChatTemplate:
    """A compiled template, in the environment that model authors write theirs for.

    `max_characters` bounds what a rendering may grow to; loops are bounded by the sandbox's range.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._max_characters = max_characters
        self._special_tokens = dict(special_tokens)
        self._error: str | None = None if source else "this model has no chat template; use completions"
        self._template: jinja2.Template | None = None
        if source:
            try:
                self._template = _environment().from_string(source)
            except Exception as error:  # a template is foreign code; compiling it can fail in many ways
                self._error = f"the model's chat template is damaged: {error}"

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises RequestError for messages that the template cannot take."""
        if self._template is None:
            raise RequestError(str(self._error), param="messages")
        checked = [_check_message(index, message) for index, message in enumerate(_check_list(messages))]
        pieces: list[str] = []
        room = self._max_characters
        try:
            for piece in self._stream(checked, add_generation_prompt):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    break
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # whatever foreign code does with messages that it was not written for
            raise RequestError(f"the chat template cannot take these messages: {error}", param="messages") from error
        if room < 0:
            raise RequestError(
                f"the conversation has more than {self._max_characters} characters",
                param="messages",
                code="context_length_exceeded",
            )
        return "".join(pieces)

    def _stream(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> Iterator[str]:
        assert self._template is not None
        return self._template.generate(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._special_tokens
        )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt it stands for what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's own nodes, without the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{where}.name must be a string", param=f"{where}.name")
    for text in (role, content, name or ""):
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise RequestError(f"{where} holds a lone surrogate, which no UTF-8 can hold", param=where)
    for feature in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if message.get(feature):
            raise RequestError(f"{where}.{feature} is not supported yet", param=f"{where}.{feature}")
    return {"role": role, "content": content, **({"name": name} if name else {})}


def _text_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.content holds a part of type {kind!r:.40}; only text is supported", param=where)
    return str(part["text"])
