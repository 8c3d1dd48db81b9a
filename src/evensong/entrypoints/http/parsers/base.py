"""ChoiceParser: one choice's text to reasoning, content and tool calls, as it comes or all at once."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct):
    """What is new of one call; `id` and `name` stand in a call's first delta only, with no arguments yet perhaps."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Delta(msgspec.Struct):
    """What is new of a choice. The join of all deltas does not depend on how the text was cut."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class Part(Protocol):
    """A parser of one stage: of reasoning, or of tool calls."""

    def push(self, text: str) -> Delta:
        """What is certain after `text`."""

    def finish(self) -> Delta:
        """What was held back, now that no text follows."""


class ToolPart(Part, Protocol):
    """A parser of tool calls."""

    @property
    def called(self) -> bool:
        """Whether a call has begun."""


class ChoiceParser:
    """For one choice. The text passes `reasoning` first; what it calls content passes `tools`.

    A whole answer is made of `push` with all of the text and `finish`.
    """

    def __init__(
        self, reasoning: Part | None = None, tools: ToolPart | None = None, *, include_reasoning: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._include_reasoning = include_reasoning

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._tools is not None and self._tools.called

    @property
    def plain(self) -> bool:
        """Whether all of the text is content."""
        return self._reasoning is None and self._tools is None

    def push(self, text: str) -> Delta:
        """What is certain after `text`."""
        if self._reasoning is None:
            return self._through_tools(Delta(content=text))
        return self._through_tools(self._reasoning.push(text))

    def finish(self) -> Delta:
        """What was held back, now that no text follows."""
        first = Delta() if self._reasoning is None else self._through_tools(self._reasoning.finish())
        return first if self._tools is None else joined(first, self._tools.finish())

    def whole(self, text: str) -> Delta:
        """All of a text at once."""
        return joined(self.push(text), self.finish())

    def _through_tools(self, delta: Delta) -> Delta:
        reasoning = delta.reasoning if self._include_reasoning else ""
        if self._tools is None or not delta.content:
            return Delta(reasoning, delta.content)
        found = self._tools.push(delta.content)
        return Delta(reasoning, found.content, found.tool_calls)


def joined(first: Delta, second: Delta) -> Delta:
    """Two deltas as one; those of the same call are merged."""
    calls = [msgspec.structs.replace(call) for call in first.tool_calls]
    by_index = {call.index: call for call in calls}
    for call in second.tool_calls:
        known = by_index.get(call.index)
        if known is None:
            by_index[call.index] = copied = msgspec.structs.replace(call)
            calls.append(copied)
        else:
            known.arguments += call.arguments
    return Delta(first.reasoning + second.reasoning, first.content + second.content, calls)
