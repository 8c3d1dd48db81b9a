"""Chat messages to prompt text, with the model's own Jinja template in a sandbox."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evensong.config.sections import ENGINE_SECTIONS, ServerConfig
from evensong.engine.frontend.chat_messages import check_messages
from evensong.engine.frontend.chat_tools import ToolStyle, shown_as_text
from evensong.protocol.errors import RequestError

MAX_CHARACTERS = 64 * 1024 * 1024
MAX_KWARGS = 64
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# What a request says in fields of its own, or what steers tokenizing elsewhere: no keyword of a template.
_FIELDS = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "tokenizer", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
)
_SETTINGS = frozenset(
    field.name for cls in (*ENGINE_SECTIONS.values(), ServerConfig) for field in dataclasses.fields(cls)
)


class ChatTemplate:
    """A compiled template, in the environment that model authors write theirs for.

    `max_characters` bounds what a rendering may grow to; loops are bounded by the sandbox's range. `error` says why the
    template cannot be used, where that is so.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._max_characters = max_characters
        self.special_tokens = dict(special_tokens)
        self.error: str | None = None if source else "this model has no chat template; use completions"
        self._template: jinja2.Template | None = None
        # Names that the template uses and does not set.
        self._takes: set[str] = set()
        environment = _environment()
        self._reserved = _FIELDS | _SETTINGS | set(special_tokens) | set(environment.globals)
        if source:
            try:
                self._template = environment.from_string(source)
                self._takes = jinja2.meta.find_undeclared_variables(environment.parse(source))
            except Exception as error:  # a template is foreign code; compiling it can fail in many ways
                self.error = f"the chat template is damaged: {error}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_style: Mapping[str, str] | None = None,
        reasoning_effort: str | None = None,
    ) -> str:
        """The prompt of a conversation. Raises RequestError for what the template cannot take.

        It ends with the head of an answer (`add_generation_prompt`; None: unless a message is continued), or in the
        middle of the last message, right after its content (`continue_final_message`). `kwargs` are variables of the
        template's own. A template without a place for `tools` is given them as text, in the `tool_style` (the fields of
        a ToolStyle).
        """
        if self._template is None:
            raise RequestError(str(self.error), param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        variables = self._variables(kwargs or {}, documents) | self._effort(reasoning_effort)
        checked = check_messages(messages)
        if "tools" in self._takes:
            variables["tools"] = tools or None
        elif tools or any("tool_calls" in message for message in checked):
            checked = shown_as_text(checked, tools or (), ToolStyle(**(tool_style or {})))
        variables["add_generation_prompt"] = (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        )
        if not continue_final_message:
            return self._run(checked, variables)
        if checked[-1].get("tool_calls"):
            raise _cannot_continue()
        # A mark at the end of the content shows where the template put it, and keeps it from being trimmed there.
        mark = _mark_for(checked)
        checked[-1]["content"] += mark
        before, *after = self._run(checked, variables).split(mark)
        if len(after) != 1:
            raise _cannot_continue()
        return before

    def _variables(self, kwargs: Mapping[str, Any], documents: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        if not isinstance(kwargs, Mapping) or len(kwargs) > MAX_KWARGS:
            raise RequestError(
                f"chat_template_kwargs must be an object of at most {MAX_KWARGS} keys", param="chat_template_kwargs"
            )
        for name in kwargs:
            if not isinstance(name, str) or not name.isidentifier() or name in self._reserved:
                raise RequestError(
                    f"chat_template_kwargs cannot set {name!r:.60}: that is no variable of the template's own",
                    param="chat_template_kwargs",
                )
        if documents:
            if not isinstance(documents, (list, tuple)) or not all(isinstance(one, Mapping) for one in documents):
                raise RequestError("documents must be a list of objects", param="documents")
            if "documents" not in self._takes:
                raise RequestError("this model's chat template takes no documents", param="documents")
        return {**kwargs, **self.special_tokens, "documents": documents or None, "tools": None}

    def _effort(self, effort: str | None) -> dict[str, str]:
        if effort in (None, "none"):
            return {}
        if effort not in EFFORTS:
            raise RequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
        if "reasoning_effort" not in self._takes:
            raise RequestError("this model's chat template takes no reasoning_effort", param="reasoning_effort")
        return {"reasoning_effort": effort}

    def _run(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_characters
        try:
            for piece in self._stream(messages, variables):
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

    def _stream(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> Iterator[str]:
        assert self._template is not None
        return self._template.generate(messages=messages, **variables)


def _mark_for(messages: list[dict[str, Any]]) -> str:
    """A character of private use that stands in none of the messages. Raises RequestError where all of them do."""
    used = set().union(*(message["content"] for message in messages))
    for mark in map(chr, range(0xE000, 0xF900)):
        if mark not in used:
            return mark
    raise _cannot_continue()


def _cannot_continue() -> RequestError:
    return RequestError(
        "the chat template does not show the final message as it is, so it cannot be continued",
        param="continue_final_message",
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
