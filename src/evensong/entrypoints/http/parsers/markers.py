"""Markers in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first of `markers` stands, and which; (-1, "") where none does. Of two at one place, the longer."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    return min(((at, marker) for at, _, marker in sorted(found) if at >= 0), key=lambda one: one[0], default=(-1, ""))


def num_held(text: str, markers: Sequence[str], *, spaces: bool = False) -> int:
    """Length of the end of `text` that may begin a marker; with `spaces`, of the white space before it too."""
    longest = max((_overlap(text, marker) for marker in markers), default=0)
    if not spaces:
        return longest
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip())


def _overlap(text: str, marker: str) -> int:
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
