"""What a text may hold."""

from __future__ import annotations

import pytest

from evensong.protocol.text import has_lone_surrogate


@pytest.mark.parametrize(
    ("text", "lone"),
    [
        ("", False),
        ("plain", False),
        ("h\u00e9 \U0001f600", False),
        ("\ud7ff\ue000", False),
        ("a\ud800", True),
        ("\udfff", True),
    ],
)
def test_lone_surrogates_are_what_utf8_cannot_hold(text: str, lone: bool) -> None:
    assert has_lone_surrogate(text) is lone
    if lone:
        with pytest.raises(UnicodeEncodeError):
            text.encode()
    else:
        assert text.encode().decode() == text
