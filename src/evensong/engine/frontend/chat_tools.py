"""Tools of a conversation: checked, and shown to models whose chat template has no place for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evensong.protocol.errors import RequestError
from evensong.protocol.text import has_lone_surrogate

MAX_TOOLS = 128
# As JSON, all of them: room is left for what a grammar puts around them.
MAX_CHARACTERS = 192 * 1024
MAX_DESCRIPTION_DEPTH = 48
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


@dataclass(frozen=True)
class ToolStyle:
    """What a model is told to write around a call: `begin` holds NAME where the tool's name goes."""

    begin: str = '<tool_call>\n{"name": "NAME", "arguments": '
    end: str = "}\n</tool_call>"


@dataclass(frozen=True)
class Tool:
    """One tool, as the request has it. `strict`: its arguments must match the schema whoever decides to call."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool

    def shown(self) -> dict[str, Any]:
        """The form that chat templates are written for."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


def check_tools(tools: object) -> list[Tool]:
    """The tools of a request. Raises RequestError naming what is wrong."""
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        raise RequestError("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools are allowed, got {len(tools)}", param="tools")
    checked = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names: set[str] = set()
    for index, tool in enumerate(checked):
        if tool.name in names:
            raise RequestError(f"the name {tool.name!r} comes twice in tools", param=f"tools[{index}].function.name")
        names.add(tool.name)
    text = json.dumps([tool.shown() for tool in checked], ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"tools have {len(text)} characters, at most {MAX_CHARACTERS} are allowed", param="tools")
    if has_lone_surrogate(text):
        raise RequestError("tools hold a lone surrogate, which no UTF-8 can hold", param="tools")
    return checked


def _check_tool(where: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type must be 'function', got {tool.get('type')!r:.40}", param=f"{where}.type")
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -", param=f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.description must be text", param=f"{where}.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.strict must be true or false", param=f"{where}.strict")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    where = f"{where}.parameters"
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{where} must be a JSON schema of type object", param=where)
    _check_schema(where, parameters, MAX_DESCRIPTION_DEPTH)
    return Tool(name, description, {"type": "object", **parameters}, bool(strict))


def _check_schema(where: str, schema: object, depth: int) -> None:
    """Raises RequestError for what is no schema, also where no grammar is made of it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping) or depth == 0:
        fault = "is nested too deep" if depth == 0 else "must be a schema: an object, true or false"
        raise RequestError(f"{where} {fault}", param=where)
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise RequestError(f"{where}.type cannot be {kind!r:.40}", param=where)
    required, enum = schema.get("required", []), schema.get("enum", [None])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required must be a list of names", param=where)
    if not isinstance(enum, list) or not enum:
        raise RequestError(f"{where}.enum must be a list with a value", param=where)
    for key in _SCHEMA_MAPS:
        inner = schema.get(key, {})
        if not isinstance(inner, Mapping):
            raise RequestError(f"{where}.{key} must be an object", param=where)
        for name, one in inner.items():
            _check_schema(f"{where}.{key}.{name:.40}", one, depth - 1)
    for key in _SCHEMA_LISTS:
        several = schema.get(key, [True])
        if not isinstance(several, list) or not several:
            raise RequestError(f"{where}.{key} must be a list of schemas", param=where)
        for index, one in enumerate(several):
            _check_schema(f"{where}.{key}[{index}]", one, depth - 1)
    for key in _SCHEMAS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            _check_schema(f"{where}.{key}", schema[key], depth - 1)


def shown_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], style: ToolStyle
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows neither tools nor calls.

    The tools stand at the end of the system message, calls in the text of the assistant's, and results in messages of
    the user: the Hermes 2 Pro way of writing them.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1].get("results"):
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text, "results": True})
            continue
        calls = [_call_text(call["function"], style) for call in message.get("tool_calls", ())]
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        plain.append({**others, "content": "\n".join([*filter(None, [message["content"]]), *calls])})
    for message in plain:
        message.pop("results", None)
    if tools:
        _add_description(plain, _description(tools, style))
    return plain


def _call_text(function: Mapping[str, Any], style: ToolStyle) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return style.begin.replace("NAME", function["name"]) + arguments + style.end


def _add_description(messages: list[dict[str, Any]], text: str) -> None:
    if messages[0]["role"] in ("system", "developer"):
        messages[0]["content"] = "\n\n".join(filter(None, [messages[0]["content"], text]))
    else:
        messages.insert(0, {"role": "system", "content": text})


def _description(tools: Sequence[Mapping[str, Any]], style: ToolStyle) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = style.begin.replace("NAME", "<name of the function>") + "<arguments as a JSON object>" + style.end
    return (
        "You may call functions to answer the user. Their signatures are in <tools></tools>:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call a function, write exactly this, and one for each call:\n{example}"
    )
