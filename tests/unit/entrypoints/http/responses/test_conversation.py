"""Items to messages, and which items cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.entrypoints.http.responses.conversation import messages_of
from evensong.protocol.errors import RequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def test_a_conversation() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("1 + 2?", "Now.")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Sum."}]},
        CALL,
        {**CALL, "call_id": "c2"},
        {**OUTPUT, "call_id": "c2"},
        OUTPUT,
        {"role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
        {"role": "user", "content": "Thanks"},
    ]
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ("c1", "c2")]
    assert messages_of(items, 0, "You add.") == [
        {"role": "system", "content": "You add.\n\nBe brief."},
        {"role": "user", "content": "1 + 2?\nNow."},
        {"role": "assistant", "content": "", "reasoning_content": "Sum.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([7], "input[0]"),
        ([{"type": "web_search_call"}], "input[0]"),
        ([{"type": ["message"]}], "input[0]"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_text", "text": 1}]}], "input[0].content"),
        ([CALL], "input[0]"),
        ([OUTPUT], "input[0].call_id"),
        ([CALL, OUTPUT, OUTPUT], "input[2].call_id"),
        ([CALL, CALL, OUTPUT], "input[1].call_id"),
        ([{**CALL, "arguments": {}}, OUTPUT], "input[0].arguments"),
        ([{"type": "reasoning", "content": "a"}], "input[0].content"),
        ([{"role": "user", "content": "a"}] * 4097, "input"),
    ],
)
def test_what_cannot_be_is_named(items: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages_of(items, 0, None)
    assert caught.value.param == param


def test_places_count_from_the_request_s_own_items() -> None:
    with pytest.raises(RequestError) as caught:
        messages_of([{"role": "user", "content": "a"}, {"role": "user"}], 1, None)
    assert caught.value.param == "input[0].content"
    # A call of an earlier response waits for its output.
    with pytest.raises(RequestError) as caught:
        messages_of([CALL, {"role": "user", "content": "a"}], 1, None)
    assert caught.value.param == "previous_response_id"
