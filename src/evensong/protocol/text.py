"""What a text may hold."""

from __future__ import annotations


def has_lone_surrogate(text: str) -> bool:
    """True for a text that UTF-8, and so every message, cannot hold; JSON's escapes can make one."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
