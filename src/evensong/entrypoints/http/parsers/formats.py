"""How families of models write calls: what their parser looks for, and the grammar that makes a model write them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """One family's way.

    A call is an object; `openers` come before it, `closer` after it, `separators` between calls. `arrays`: calls may
    stand in an array. `bare`: they may begin the text without an opener. `named`: after an opener may stand a tool's
    name, this mark and the arguments.
    For a grammar: `begin` (with NAME) and `end` surround a call's arguments, `between` two calls, `head` and `tail` all
    of them. `trigger` is what a call begins with and other text does not.
    """

    name: str
    begin: str
    end: str
    trigger: str
    between: str = ""
    head: str = ""
    tail: str = ""
    openers: tuple[str, ...] = ()
    closer: str = ""
    separators: str = ""
    arrays: bool = False
    bare: bool = False
    named: str = ""
    id_chars: int = 24
    id_prefix: str = "call_"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that some tokenizers have as special tokens; the parser must see them."""
        return tuple(filter(None, (*self.openers, self.closer, self.named, "[CALL_ID]" if self.named else "")))

    def call_id(self, prompt: str, choice: int, index: int) -> str:
        """A call's id. The same request has the same ids; in a conversation, where prompts grow, none comes twice."""
        digest = hashlib.blake2b(f"{choice} {index} {prompt}".encode(), digest_size=16).hexdigest()
        return self.id_prefix + digest[: self.id_chars]

    def forced(self, schemas: Schemas, *, parallel: bool) -> dict[str, Any]:
        """A structural tag's format of at least one call; of exactly one where not `parallel`."""
        if not parallel:
            calls = _either([self._tag(name, schema) for name, schema in schemas.items()])
            return _sequence(_text(self.head), calls, _text(self.tail))
        calls = {
            "type": "tags_with_separator",
            "tags": [self._tag(name, schema) for name, schema in schemas.items()],
            "separator": self.between,
            "at_least_one": True,
            "stop_after_first": False,
        }
        return _sequence(_text(self.head), calls, _text(self.tail))

    def free(self, schemas: Schemas, *, parallel: bool) -> dict[str, Any]:
        """A structural tag's format of any text in which calls, where there are any, match their schemas."""
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": [self._tag(name, schema, alone=True) for name, schema in schemas.items()],
            "at_least_one": False,
            "stop_after_first": not parallel,
        }

    def _tag(self, name: str, schema: Any, *, alone: bool = False) -> dict[str, Any]:
        head, tail = (self.head, self.tail) if alone and self.head.startswith(self.trigger) else ("", "")
        return {
            "type": "tag",
            "begin": head + self.begin.replace("NAME", name),
            "content": {"type": "json_schema", "json_schema": schema},
            "end": self.end + tail,
        }


def _text(value: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": value} if value else None


def _either(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _sequence(*elements: dict[str, Any] | None) -> dict[str, Any]:
    given = [element for element in elements if element is not None]
    return given[0] if len(given) == 1 else {"type": "sequence", "elements": given}


TOOL_FORMATS = {
    one.name: one
    for one in (
        # Hermes 2 Pro and its successors, Qwen 2.5 and 3.
        ToolFormat(
            "hermes",
            begin='<tool_call>\n{"name": "NAME", "arguments": ',
            end="}\n</tool_call>",
            trigger="<tool_call>",
            between="\n",
            openers=("<tool_call>",),
            closer="</tool_call>",
        ),
        # Llama 3.1 to 3.3.
        ToolFormat(
            "llama3_json",
            begin='{"name": "NAME", "parameters": ',
            end="}",
            trigger='{"name": "',
            between="; ",
            openers=("<|python_tag|>",),
            separators=";,",
            arrays=True,
            bare=True,
        ),
        # Mistral up to the tokenizer's version 7: an array after the mark. Its templates want ids of nine characters.
        ToolFormat(
            "mistral",
            begin='{"name": "NAME", "arguments": ',
            end="}",
            trigger="[TOOL_CALLS]",
            between=", ",
            head="[TOOL_CALLS] [",
            tail="]",
            openers=("[TOOL_CALLS]",),
            arrays=True,
            named="[ARGS]",
            id_chars=9,
            id_prefix="",
        ),
        # Mistral from version 11 on: each call has a mark of its own.
        ToolFormat(
            "mistral_named",
            begin="[TOOL_CALLS]NAME[ARGS]",
            end="",
            trigger="[TOOL_CALLS]",
            openers=("[TOOL_CALLS]",),
            arrays=True,
            named="[ARGS]",
            id_chars=9,
            id_prefix="",
        ),
        # Models that were never trained to call: the whole text is a call, or an array of them.
        ToolFormat(
            "json",
            begin='{"name": "NAME", "arguments": ',
            end="}",
            trigger='{"name": "',
            between=", ",
            head="[",
            tail="]",
            arrays=True,
            bare=True,
        ),
    )
}
