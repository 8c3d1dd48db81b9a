"""CallReader: one call of a tool, read while it comes."""

from __future__ import annotations

import json
from collections.abc import Collection

from evensong.entrypoints.http.parsers.json_scan import WHITE, ValueScanner

ARGUMENT_KEYS = ("arguments", "parameters")


class CallReader:
    """Reads `{"name": …, "arguments": {…}}`, keys in any order and others among them; with `name` the arguments alone.

    `started`: it is a call, of a tool in `names`. `ended`: no more of it comes, also where it broke off. `failed`: it
    is no call; `raw` is what it took.
    """

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        self.name = name
        self.raw = ""
        self.started = False
        self.ended = False
        self.failed = False
        self._names = names
        self._alone = name is not None
        self._expects = "value" if self._alone else "{"
        self._key = ARGUMENT_KEYS[0] if self._alone else ""
        self._scanner: ValueScanner | None = None
        self._value = ""
        self._has_arguments = False
        self._in_arguments = False
        self._arguments = ""

    def push(self, text: str) -> int:
        """Takes what is the call's; returns how many characters that is."""
        at = 0
        while at < len(text) and not (self.ended or self.failed):
            if self._scanner is not None:
                at = self._scan(self._scanner, text, at)
            elif text[at] in WHITE:
                at += 1
            else:
                at += self._step(text[at])
        if not self.started:
            self.raw += text[:at]
        return at

    def take(self) -> str:
        """What is new of the arguments, in the model's own writing."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _step(self, char: str) -> int:
        """One character between values; 1 where it is taken."""
        if self._expects == "{" and char == "{":
            self._expects = "key"
        elif self._expects == "key" and char == '"':
            self._scanner = ValueScanner()
            return 0
        elif self._expects == ":" and char == ":":
            self._expects = "value"
        elif self._expects == "value":
            return self._begin_value(char)
        elif self._expects == "," and char == ",":
            self._expects = "key"
        elif self._expects == "," and char == "}":
            self._end()
        else:
            self._break()
            return 0
        return 1

    def _begin_value(self, char: str) -> int:
        if self._key in ARGUMENT_KEYS and not self._has_arguments:
            if char != "{":
                self._break()
                return 0
            self._has_arguments = self._in_arguments = True
            self.started = self.name is not None
        self._scanner = ValueScanner()
        return 0

    def _scan(self, scanner: ValueScanner, text: str, at: int) -> int:
        end = scanner.scan(text, at)
        if self._in_arguments:
            self._arguments += text[at:end]
        elif not self.started:
            self._value += text[at:end]
        if scanner.broken:
            self._break()
        elif scanner.done:
            self._scanner = None
            self._end_value()
        return end

    def _end_value(self) -> None:
        value, self._value = self._value, ""
        if self._in_arguments:
            self._in_arguments = False
            self.ended = self._alone
        elif self._expects == "key":
            self._key = "" if self.started else self._text(value) or ""
            self._expects = ":"
            return
        elif self._key == "name" and self.name is None:
            self.name = self._text(value)
            if self.name not in self._names:
                self._break()
                return
            self.started = self._has_arguments
        self._expects = ","

    def _text(self, value: str) -> str | None:
        try:
            text = json.loads(value, strict=False)
        except ValueError:
            return None
        return text if isinstance(text, str) else None

    def _end(self) -> None:
        """The object is whole; a call without arguments has none to give."""
        if not self.started and self.name is not None:
            self.started, self._arguments = True, "{}"
        self.ended, self.failed = self.started, not self.started

    def _break(self) -> None:
        self.ended, self.failed = self.started, not self.started
