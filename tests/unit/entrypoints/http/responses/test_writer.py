"""Events of a response: complete, in order, numbered, and their end is the whole response."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.entrypoints.http.responses.writer import ResponseWriter
from evensong.entrypoints.http.said import Piece, Said
from tests.unit.entrypoints.http.saying import said

FRAME = {"id": "resp_x", "object": "response", "error": None, "incomplete_details": None, "completed_at": None}
TEXT = '<Thinking.>Hello [add|{"a": 1}][add|{"a": 2}] bye'


def written(text: str, cut: int, finish: str = "stop") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    writer = ResponseWriter(FRAME, "x")
    events = writer.opened()
    for one in said(text, cut, finish):
        events += writer.add(one)
    return events, writer.response()


def without_time(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "completed_at": None}


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
def test_streamed_and_whole_are_the_same(cut: int) -> None:
    _, whole = written(TEXT, 1000)
    events, response = written(TEXT, cut)
    assert without_time(response) == without_time(whole)
    assert events[-1]["type"] == "response.completed" and events[-1]["response"] == response
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_events_build_the_items(cut: int) -> None:
    """A client that knows only the events has the output in the end."""
    events, response = written(TEXT, cut)
    texts: dict[str, str] = {}
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
        elif event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif event["type"].endswith("_text.done"):
            assert event["text"] == texts[event["item_id"]]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == texts[event["item_id"]] and event["name"] == "add"
        elif event["type"] == "response.output_item.done":
            items.append(event["item"])
    assert items == response["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item["id"].partition("_")[0] for item in items] == ["rs", "msg", "fc", "fc", "msg"]
    assert len({item["id"] for item in items}) == len(items)
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Thinking."}]
    assert items[1]["content"][0]["text"] == "Hello "
    assert [item["arguments"] for item in items[2:4]] == ['{"a": 1}', '{"a": 2}']
    assert [item["call_id"] for item in items[2:4]] == ["call_0", "call_1"]
    assert all(item["status"] == "completed" for item in items)


def test_a_cut_response_is_incomplete() -> None:
    events, response = written('Hello [add|{"a":', 3, "length")
    assert events[-1]["type"] == "response.incomplete" and response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"a":'
    assert response["completed_at"] is None


def test_an_empty_response_has_an_empty_message() -> None:
    _, response = written("", 1)
    (message,) = response["output"]
    assert message["content"][0]["text"] == "" and response["status"] == "completed"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 16


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_other_ends(reason: str) -> None:
    events, response = written("Hel", 1, reason)
    status = {"abort": "cancelled", "error": "failed"}[reason]
    assert response["status"] == status and events[-1]["response"] == response
    assert (response["error"] is None) == (reason == "abort")


def test_failing_and_cancelling_end_once() -> None:
    writer = ResponseWriter(FRAME, "x")
    for one in said("Hello", 2, finish="stop")[:2]:
        writer.add(one)
    last = writer.failed(500, {"message": "the engine died"})[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == "Hell"
    assert writer.cancelled() == [] and writer.response()["status"] == "failed"


def test_log_probabilities_are_all_there() -> None:
    """Those of tokens whose text is held back, and of the last token, which has none."""

    def one(text: str, names: str, finish: str | None = None) -> Said:
        template = said("", 1)[0]
        pieces = [Piece("content", text)] if text else []
        return Said(pieces, template.usage, [{"token": name} for name in names], finish)

    writer = ResponseWriter(FRAME, "x")
    events = [event for item in (one("", "a"), one("bc", "bc"), one("", "d", "stop")) for event in writer.add(item)]
    deltas = [event["logprobs"] for event in events if event["type"].endswith(".delta")]
    assert deltas == [[{"token": "a"}, {"token": "b"}, {"token": "c"}]]
    part = writer.response()["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == list("abcd")
