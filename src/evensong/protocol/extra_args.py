"""extra_args: what a request tells logits processors, as JSON; bounded, since it travels with the request."""

from __future__ import annotations

import math
from typing import Any

from evensong.protocol.errors import RequestError
from evensong.protocol.text import has_lone_surrogate

MAX_VALUES = 2_000
MAX_CHARS = 65_536
MAX_DEPTH = 8
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def checked_extra_args(value: object, field: str = "extra_args") -> dict[str, Any] | None:
    """`value` if it is an object of JSON values within the bounds; None for an empty one. Raises RequestError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object", param=field)
    _Bounds(field).walk(value, 1)
    return value or None


class _Bounds:
    """Counts what was walked over, so that the sum is bounded."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._values = 0
        self._chars = 0

    def walk(self, value: object, depth: int) -> None:
        """Raises RequestError at the first thing that is no JSON value, or too much."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._no(f"holds over {MAX_VALUES} values")
        if isinstance(value, (dict, list, tuple)):
            if depth > MAX_DEPTH:
                raise self._no(f"is nested more than {MAX_DEPTH} levels deep")
            if isinstance(value, dict):
                for key in value:
                    self._text(key)
                value = list(value.values())
            for item in value:
                self.walk(item, depth + 1)
        elif isinstance(value, str):
            self._text(value)
        elif isinstance(value, int):  # bool with it
            if not _INT_MIN <= value <= _INT_MAX:
                raise self._no("holds an integer of over 64 bits")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise self._no("holds a number that is not finite")
        elif value is not None:
            raise self._no(f"holds a {type(value).__name__}, which is no JSON value")

    def _text(self, text: object) -> None:
        if not isinstance(text, str):
            raise self._no(f"has a key that is no text: {text!r:.40}")
        self._chars += len(text)
        if self._chars > MAX_CHARS:
            raise self._no(f"holds over {MAX_CHARS} characters")
        if has_lone_surrogate(text):
            raise self._no("holds a lone surrogate, which no text can contain")

    def _no(self, fault: str) -> RequestError:
        return RequestError(f"{self._field} {fault}", param=self._field)
