"""Where a JSON value ends, found while it comes."""

from __future__ import annotations

import re

WHITE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_STRING_RUN = re.compile(r'[^"\\]+')
# What may stand in a value outside of strings and brackets: numbers and words, and what separates them.
_PLAIN_RUN = re.compile(r"[-+.0-9Etrufalsen:, \t\r\n]+")
_SCALAR_RUN = re.compile(r"[-+.0-9Etrufalsen]+")


class ValueScanner:
    """One value: brackets must match, and outside of strings stands only what JSON has there.

    Whether the value is JSON to the last comma is not its matter: its text is passed on while it comes.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def scan(self, text: str, at: int) -> int:
        """Takes characters from `at` on; returns the place of the first that is not the value's."""
        while at < len(text) and not (self.done or self.broken):
            at = self._string(text, at) if self._in_string else self._outside(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        run = _STRING_RUN.match(text, at)
        if run is not None:
            return run.end()
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        char = text[at]
        if self._closers or not self._scalar:
            if char == '"':
                self._in_string = True
                return at + 1
            if char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
                return at + 1
        if self._closers and char == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
            return at + 1
        run = (_PLAIN_RUN if self._closers else _SCALAR_RUN).match(text, at)
        if run is not None:
            self._scalar = self._scalar or not self._closers
            return run.end()
        # A number or word of its own ends before what follows it.
        self.done, self.broken = self._scalar, not self._scalar
        return at
