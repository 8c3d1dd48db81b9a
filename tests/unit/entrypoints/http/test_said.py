"""What a turn says keeps its order, however the text was cut."""

from __future__ import annotations

import pytest

from tests.unit.entrypoints.http.saying import said

TEXT = "<Let me see.>First [add|{1}]then[mul|{2}][add|{3}]done."
ORDER = [
    ("reasoning", "Let me see."),
    ("content", "First "),
    ("call", "{1}"),
    ("content", "then"),
    ("call", "{2}"),
    ("call", "{3}"),
    ("content", "done."),
]


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 20, 1000])
def test_order_does_not_depend_on_cuts(cut: int) -> None:
    found: list[list[str]] = []
    for one in said(TEXT, cut):
        for piece in one.pieces:
            begins = piece.call is not None and piece.call.name is not None
            if found and found[-1][0] == piece.kind and not begins:
                found[-1][1] += piece.text
            else:
                found.append([piece.kind, piece.text])
    assert [tuple(pair) for pair in found] == ORDER
