"""Which tools a request lets the model call, and the grammar that holds it to that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evensong.engine.frontend.chat_tools import Tool, check_tools
from evensong.entrypoints.http.parsers.formats import ToolFormat
from evensong.entrypoints.http.schemas import ChatForm
from evensong.protocol.errors import RequestError
from evensong.protocol.structured import StructuredOutputsParams

Mode = Literal["none", "auto", "required", "named"]
_PARAM = "tool_choice"


@dataclass(frozen=True)
class ToolUse:
    """`tools` are what the prompt shows; `callable` of them may be called. Not `parallel`: at most one call."""

    mode: Mode
    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    parallel: bool = True

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call, whatever the model would say."""
        return self.mode in ("required", "named")

    @property
    def names(self) -> frozenset[str]:
        """The names of what may be called."""
        return frozenset(tool.name for tool in self.callable)

    def grammar(self, form: ToolFormat) -> StructuredOutputsParams | None:
        """What the output must look like; None where it is the model's own matter."""
        if self.must_call:
            schemas = {tool.name: tool.parameters for tool in self.callable}
            return _structural_tag(form.forced(schemas, parallel=self.parallel and self.mode == "required"))
        if self.callable and (not self.parallel or any(tool.strict for tool in self.callable)):
            # A tool that is not strict takes any object.
            loose = {"type": "object"}
            schemas = {tool.name: tool.parameters if tool.strict else loose for tool in self.callable}
            return _structural_tag(form.free(schemas, parallel=self.parallel))
        return None


def _structural_tag(form: dict[str, Any]) -> StructuredOutputsParams:
    # Markers that are tokens of their own are written as such.
    tag = json.dumps({"type": "structural_tag", "format": form, "special_tokens": True}, ensure_ascii=False)
    return StructuredOutputsParams(structural_tag=tag)


def tool_use(form: ChatForm) -> ToolUse:
    """The tools of `form` and its tool_choice. Raises RequestError naming what cannot be."""
    tools = tuple(check_tools(form.tools))
    mode, names = _choice(form.tool_choice, bool(tools))
    by_name = {tool.name: tool for tool in tools}
    for name in names or ():
        if name not in by_name:
            raise RequestError(f"{_PARAM} names {name!r:.80}, which is not in tools", param=_PARAM)
    if mode == "required" and not tools:
        raise RequestError(f"{_PARAM} 'required' needs tools", param=_PARAM)
    if mode == "none" or not tools:
        return ToolUse("none")
    allowed = tools if names is None else tuple(tool for tool in tools if tool.name in names)
    return ToolUse(mode, tools, allowed, form.parallel_tool_calls is not False)


def _choice(choice: object, has_tools: bool) -> tuple[Mode, list[str] | None]:
    """The mode, and the names that it is about; None for all tools."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if choice == "none" or choice == "auto" or choice == "required":
        return choice, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "named", [_name(choice)]
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools" and isinstance(allowed, Mapping):
        mode, listed = allowed.get("mode"), allowed.get("tools")
        if (mode == "auto" or mode == "required") and isinstance(listed, list) and listed:
            return mode, [_name(tool) for tool in listed]
        raise RequestError(f"{_PARAM}.allowed_tools needs a mode, auto or required, and a list of tools", param=_PARAM)
    raise RequestError(f"{_PARAM} must be none, auto, required, or an object that names a function", param=_PARAM)


def _name(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"{_PARAM} must name a function: {{'type': 'function', 'function': …}}", param=_PARAM)
    return name
