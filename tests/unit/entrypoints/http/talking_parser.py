"""A parser of three kinds for tests: `<...>` is reasoning, `[name|arguments]` a call, the rest content."""

from __future__ import annotations

from evensong.entrypoints.http.parsers.base import ChoiceParser, Delta, ToolCallDelta, joined


class Marked:
    """Reads marks; nothing is held back."""

    def __init__(self) -> None:
        self._state = "content"
        self._name = ""
        self._num_calls = 0

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def push(self, text: str) -> Delta:
        """What is new after `text`."""
        whole = Delta()
        for character in text:
            whole = joined(whole, self._one(character))
        return whole

    def finish(self) -> Delta:
        """Nothing is held back."""
        return Delta()

    def _one(self, character: str) -> Delta:
        if character in "<[":
            self._state, self._name = {"<": "reasoning", "[": "name"}[character], ""
            return Delta()
        if character in ">]":
            self._state = "content"
            return Delta()
        if self._state == "reasoning":
            return Delta(reasoning=character)
        if self._state == "content":
            return Delta(content=character)
        if self._state == "name":
            if character != "|":
                self._name += character
                return Delta()
            self._state, self._num_calls = "arguments", self._num_calls + 1
            index = self._num_calls - 1
            return Delta(tool_calls=[ToolCallDelta(index, f"call_{index}", self._name, "")])
        return Delta(tool_calls=[ToolCallDelta(self._num_calls - 1, None, None, character)])


class MarkedParser(ChoiceParser):
    """All of it in one stage."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self._marked = Marked()

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._marked.called

    @property
    def plain(self) -> bool:
        """Marks are read."""
        return False

    def push(self, text: str) -> Delta:
        """What is new after `text`."""
        return self._marked.push(text)

    def finish(self) -> Delta:
        """Nothing is held back."""
        return Delta()
