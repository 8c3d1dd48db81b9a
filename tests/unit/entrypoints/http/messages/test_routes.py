"""/v1/messages on the real application: keys, errors in Anthropic's form, streams that fail."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

from tests.unit.entrypoints.http.serving import ANSWER, Served, TalkingClient, Visitor, run, until

HELLO: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n")[:-1]:
        name, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_whole_and_streamed() -> None:
    async def body(served: Served) -> None:
        whole = (await served.post("/v1/messages", **HELLO, seed=1)).json()
        assert whole["content"] == [{"type": "text", "text": ANSWER}]
        assert (whole["stop_reason"], whole["seed"], whole["type"]) == ("end_turn", 1, "message")
        answer = await served.post("/v1/messages", **HELLO, seed=1, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        assert text == ANSWER and events[-1] == {"type": "message_stop"}
        counted = await served.post("/v1/messages/count_tokens", model="demo", messages=HELLO["messages"])
        assert counted.json() == {"input_tokens": whole["usage"]["input_tokens"]}

    run(body)


def test_a_key_in_either_header() -> None:
    async def body(served: Served) -> None:
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            answer = await served.http.post("/v1/messages", json=HELLO, headers=headers)
            assert answer.status_code == 200, answer.text
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": ""}):
            answer = await served.http.post("/v1/messages", json=HELLO, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["content-length"] == str(len(answer.content))
        # Elsewhere that header says nothing.
        refused = await served.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": "secret"})
        assert refused.status_code == 401 and "type" not in refused.json()

    run(body, api_key=("secret",))


def test_every_refusal_has_anthropic_s_form() -> None:
    async def body(served: Served) -> None:
        answers = [
            (404, "not_found_error", await served.post("/v1/messages", **{**HELLO, "model": "other"})),
            (400, "invalid_request_error", await served.post("/v1/messages", messages=[])),
            (400, "invalid_request_error", await served.post("/v1/messages", **{**HELLO, "container": "c"})),
            (400, "invalid_request_error", await served.http.post("/v1/messages", content=b"{")),
            (413, "request_too_large", await served.http.post("/v1/messages", content=b"{" * 5000)),
            (405, "invalid_request_error", await served.http.get("/v1/messages")),
            (404, "not_found_error", await served.http.get("/v1/messages/nothing")),
        ]
        served.state.draining = True
        answers.append((503, "overloaded_error", await served.post("/v1/messages", **HELLO)))
        for status, kind, answer in answers:
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["type"] == kind
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert answers[-1][2].headers["retry-after"]
        other = await served.http.get("/v1/messagesx")
        assert "type" not in other.json()

    run(body, max_request_bytes=4096)


def test_an_engine_that_dies_ends_the_stream_with_an_error() -> None:
    async def body(served: Served) -> None:
        task = asyncio.create_task(served.post("/v1/messages", **HELLO, stream=True))
        await until(lambda: served.core.script.added)
        for _ in range(20):
            await asyncio.sleep(0.005)
        served.core.script.die()
        events = events_of((await task).text)
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"

    run(body, lambda: TalkingClient(hold_after=3))


def test_a_client_that_leaves_aborts() -> None:
    async def body(served: Served) -> None:
        visitor = Visitor(served.app, "/v1/messages", {**HELLO, "stream": True})
        await until(lambda: visitor.statuses)
        assert visitor.statuses == [200]
        visitor.leave()
        await asyncio.wait([visitor.task])
        assert len(served.core.script.aborted) == 1 and served.state.num_active == 0

    run(body, lambda: TalkingClient(hold_after=3))


THOUGHT = "<think>\nOne and one.\n</think>\n\n"
CALLS = "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {i}}}}}\n</tool_call>\n' for i in (1, 2))
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
THINKING: Any = functools.partial(TalkingClient, answer=THOUGHT + "Let me add." + CALLS)


def test_thinking_and_tools() -> None:
    async def body(served: Served) -> None:
        thinking = {"type": "enabled", "budget_tokens": 90}
        fields = {**HELLO, "max_tokens": 400, "tools": [ADD], "thinking": thinking}
        whole = (await served.post("/v1/messages", **fields)).json()
        assert served.core.script.added[-1].params.thinking_token_budget == 90
        thought, text, *uses = whole["content"]
        assert thought == {"type": "thinking", "thinking": "One and one.", "signature": ""}
        assert text["text"].strip() == "Let me add."
        assert [use["input"] for use in uses] == [{"a": 1}, {"a": 2}] and whole["stop_reason"] == "tool_use"
        events = events_of((await served.post("/v1/messages", **fields, stream=True)).text)
        started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert started == ["thinking", "text", "tool_use", "tool_use"]
        parts = [e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta"]
        assert "".join(parts) == '{"a": 1}{"a": 2}'
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        # What came goes back, as clients do it.
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "2"} for use in uses]
        turns = [
            *HELLO["messages"],
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": results},
        ]
        answer = await served.post("/v1/messages", **{**fields, "messages": turns})
        assert answer.status_code == 200, answer.text
        off = await served.post("/v1/messages", **{**HELLO, "thinking": {"type": "disabled"}})
        assert off.status_code == 200 and served.core.script.added[-1].params.thinking_token_budget is None

    run(body, THINKING, engine={"reasoning_parser": "qwen3"})
