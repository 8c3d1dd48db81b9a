"""Events of a message: a client that knows only them has the whole message in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evensong.entrypoints.http.forms_out import encode
from evensong.entrypoints.http.messages.writer import MessageWriter
from evensong.protocol.errors import RequestError
from tests.unit.entrypoints.http.saying import said

TEXT = '<Thinking.>Hello [add|{"a": 1}][mul|{"a": 2}] bye'
CONTENT = [
    {"type": "thinking", "thinking": "Thinking.", "signature": ""},
    {"type": "text", "text": "Hello "},
    {"type": "tool_use", "id": "call_0", "name": "add", "input": {"a": 1}},
    {"type": "tool_use", "id": "call_1", "name": "mul", "input": {"a": 2}},
    {"type": "text", "text": " bye"},
]


def written(
    text: str, cut: int, finish: str = "stop", stop: str | None = None, most: int = 1000
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    writer = MessageWriter({"id": "msg_x", "role": "assistant"}, most)
    events = [event for one in said(text, cut, finish, stop) for event in writer.add(one)]
    return events, json.loads(encode(writer.message()))


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content, from the events alone."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            key = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if key is not None:
                blocks[-1][key] += delta[key]
            else:
                arguments += delta["partial_json"]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments)
    return blocks


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
def test_streamed_and_whole_are_the_same(cut: int) -> None:
    events, message = written(TEXT, cut)
    assert message["content"] == built(events) == CONTENT
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5
    assert message["stop_reason"] == "tool_use" == events[-2]["delta"]["stop_reason"]
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"] == message["usage"]
    assert message["usage"]["input_tokens"] == 4 and message["usage"]["cache_read_input_tokens"] == 16


@pytest.mark.parametrize(
    ("finish", "stop", "most", "reason"),
    [
        ("stop", None, 9, "end_turn"),
        ("stop", "END", 9, "stop_sequence"),
        ("length", None, 5, "max_tokens"),
        ("length", None, 9, "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(finish: str, stop: str | None, most: int, reason: str) -> None:
    events, message = written("Hello", 2, finish, stop, most)
    assert message["stop_reason"] == reason and message["stop_sequence"] == stop
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


@pytest.mark.parametrize(("finish", "status"), [("abort", 503), ("error", 500)])
def test_an_end_that_the_api_has_no_word_for_is_an_error(finish: str, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        written("Hello", 2, finish)
    assert caught.value.status == status


def test_a_call_that_was_cut_has_no_input() -> None:
    events, message = written('[add|{"a": ', 2, "length", most=11)
    assert message["content"] == [{"type": "tool_use", "id": "call_0", "name": "add", "input": {}}]
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(parts) == '{"a": '


def test_an_empty_message() -> None:
    events, message = written("", 1)
    assert message["content"] == [] and message["stop_reason"] == "end_turn"
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]
