"""/v1/responses through the official client: whole, streamed, several turns, background, cancel, calls, bad input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.harness import Server, Survivors

QUESTION = "What is the capital of France?"
SAMPLED: dict[str, Any] = {"model": "demo", "temperature": 0.9, "extra_body": {"seed": 3}}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of the next days.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def comparable(response: Response) -> dict[str, Any]:
    """Without ids, times, and what the prefix cache had."""
    text = response.model_dump_json(exclude={"usage", "created_at", "completed_at"})
    return dict(json.loads(text.replace(response.id.removeprefix("resp_"), "ID")))


def last_of(events: list[ResponseStreamEvent]) -> Response:
    """The response that a stream ends with."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete"), last
    return last.response


def test_the_same_text_over_every_api(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(messages=messages, max_tokens=48, **SAMPLED).choices[0].message.content
    whole = client.responses.create(input=QUESTION, max_output_tokens=48, **SAMPLED)
    assert whole.output_text == chat and len(whole.output_text) > 20
    assert whole.model_extra and whole.model_extra["seed"] == 3 and whole.model_extra["system_fingerprint"]
    events = list(client.responses.create(input=QUESTION, max_output_tokens=48, stream=True, **SAMPLED))
    assert comparable(last_of(events)) == comparable(whole)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == chat
    as_items = client.responses.create(input=messages, max_output_tokens=48, **SAMPLED)
    assert as_items.output_text == chat
    usage = whole.usage
    assert usage and usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_the_client_s_own_assembly(client: OpenAI) -> None:
    with client.responses.stream(input=QUESTION, instructions="Be brief.", model="demo", temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    whole = client.responses.create(input=QUESTION, instructions="Be brief.", model="demo", temperature=0)
    assert final.output_text == whole.output_text and final.status == "completed"


def test_a_cut_response_says_so(client: OpenAI) -> None:
    response = client.responses.create(
        model="demo", input=QUESTION, max_output_tokens=5, extra_body={"ignore_eos": True}
    )
    assert response.status == "incomplete" and response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage and response.usage.output_tokens == 5


def test_turns_go_on_from_what_is_stored(client: OpenAI) -> None:
    first = client.responses.create(input=QUESTION, max_output_tokens=24, **SAMPLED)
    second = client.responses.create(
        input="And of Spain?", previous_response_id=first.id, max_output_tokens=24, **SAMPLED
    )
    by_hand: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Spain?"},
    ]
    chat = client.chat.completions.create(messages=by_hand, max_tokens=24, **SAMPLED).choices[0].message.content
    assert second.output_text == chat
    echoed: Any = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And of Spain?"}]
    assert client.responses.create(input=echoed, max_output_tokens=24, **SAMPLED).output_text == chat
    assert comparable(client.responses.retrieve(second.id)) == comparable(second)
    (item,) = client.responses.input_items.list(second.id).data
    assert item.type == "message" and item.content[0].model_dump()["text"] == "And of Spain?"
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)


def test_background_and_cancel(client: OpenAI, server: Server) -> None:
    whole = client.responses.create(input=QUESTION, max_output_tokens=48, **SAMPLED)
    running = client.responses.create(input=QUESTION, max_output_tokens=48, background=True, **SAMPLED)
    assert running.status == "in_progress"
    until = time.monotonic() + 60
    while (done := client.responses.retrieve(running.id)).status == "in_progress" and time.monotonic() < until:
        time.sleep(0.02)
    assert done.output_text == whole.output_text and done.status == whole.status
    endless: dict[str, Any] = {**SAMPLED, "extra_body": {"seed": 3, "ignore_eos": True}}
    running = client.responses.create(input=QUESTION, max_output_tokens=4000, background=True, **endless)
    time.sleep(0.2)
    cancelled = client.responses.cancel(running.id)
    assert cancelled.status == "cancelled" and len(cancelled.output_text) < 4000
    assert comparable(client.responses.retrieve(running.id)) == comparable(cancelled)
    while server.metric("num_requests_running") > 0 and time.monotonic() < until:
        time.sleep(0.05)
    assert server.metric("num_requests_running") == 0


def test_a_background_stream_is_taken_up_again(client: OpenAI) -> None:
    stream = client.responses.create(input=QUESTION, max_output_tokens=48, background=True, stream=True, **SAMPLED)
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 6:
            break
    stream.close()
    assert events[0].type == "response.created"
    again = client.responses.retrieve(events[0].response.id, stream=True, starting_after=events[-1].sequence_number)
    whole = client.responses.create(input=QUESTION, max_output_tokens=48, **SAMPLED)
    assert last_of([*events, *again]).output_text == whole.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_calls(client: OpenAI, choice: Any) -> None:
    fields: Any = {"input": "Weather in Paris?", "tools": [WEATHER], "tool_choice": choice, **SAMPLED}
    fields |= {"max_output_tokens": 400, "parallel_tool_calls": False}
    whole = client.responses.create(**fields)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "get_weather" and whole.status == "completed"
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9
    events = list(client.responses.create(**fields, stream=True))
    assert comparable(last_of(events)) == comparable(whole)
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments
    answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    following = client.responses.create(input=answer, previous_response_id=whole.id, max_output_tokens=16, **SAMPLED)
    assert following.output_text


def test_structured_text(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": schema}}
    response = client.responses.create(input="Describe a person.", text=text, max_output_tokens=400, **SAMPLED)
    assert response.status == "completed"
    assert set(json.loads(response.output_text)) == {"name", "age"}


def test_log_probabilities(client: OpenAI) -> None:
    response = client.responses.create(
        input=QUESTION, max_output_tokens=6, include=["message.output_text.logprobs"], top_logprobs=2, **SAMPLED
    )
    content: Any = response.output[0].model_dump()["content"][0]
    assert len(content["logprobs"]) == 6
    assert b"".join(bytes(entry["bytes"]) for entry in content["logprobs"]).decode() == response.output_text


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
BAD: dict[str, dict[str, Any]] = {
    "nothing": {"input": ""},
    "no items": {"input": []},
    "no input": {"input": None},
    "a lone surrogate": {"input": "a\ud800b"},
    "a lone surrogate in an item": {"input": [{"role": "user", "content": "\udfff"}]},
    "a lone surrogate in the instructions": {"instructions": "\udfff"},
    "a lone surrogate in a tool": {"tools": [{**WEATHER, "description": "\udfff"}]},
    "too many items": {"input": [{"role": "user", "content": "a"}] * 5000},
    "an item of no kind": {"input": [{"type": "computer_call", "call_id": "x"}]},
    "an image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]},
    "a call without output": {"input": [CALL]},
    "a call that is no JSON": {
        "input": [{**CALL, "arguments": "{"}, {"type": "function_call_output", "call_id": "c", "output": ""}]
    },
    "an output without call": {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
    "a hosted tool": {"tools": [{"type": "web_search"}]},
    "a tool without name": {"tools": [{"type": "function", "parameters": {}}]},
    "a tool with a wrong schema": {
        "tools": [{**WEATHER, "parameters": {"type": "objekt"}}],
        "tool_choice": "required",
    },
    "a choice of no tool": {"tool_choice": "required"},
    "a choice of another tool": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}},
    "a format of no kind": {"text": {"format": {"type": "xml"}}},
    "a schema that cannot be": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 7}}}},
    "a seed outside int64": {"seed": 2**63},
    "too many log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
    "a negative length": {"max_output_tokens": -1},
    "a wrong temperature": {"temperature": -1},
    "a prompt that is too long": {"input": "word " * 20_000},
    "an auto truncation": {"truncation": "auto"},
    "a conversation": {"conversation": "conv_1"},
    "a background that is not stored": {"background": True, "store": False},
    "a previous response that is no text": {"previous_response_id": 7},
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(server: Server, survivors: Survivors, stream: bool, background: bool) -> None:
    """400 with an OpenAI body before any byte of a stream, the same twice; a neighbour streams on."""
    with survivors.watch():
        for name, fields in BAD.items():
            body = json.dumps(
                {"input": "Hi", "max_output_tokens": 4, "stream": stream, "background": background, **fields}
            )
            answers = [server.client.post("/v1/responses", content=body) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [400, 400], (name, answers[0].text)
            assert answers[0].json() == answers[1].json(), name
            assert set(answers[0].json()["error"]) == {"message", "type", "param", "code"}, name
    server.wait_idle()


def test_other_refusals(server: Server, client: OpenAI, survivors: Survivors) -> None:
    with survivors.watch():
        for body in (b"{", b"[]", b'{"input": "a", "temperature": NaN}', b'{"input": "\xff"}', b'{"input": 7}'):
            assert server.client.post("/v1/responses", content=body).status_code == 400
        for fields in ({"model": "other"}, {"previous_response_id": "resp_x"}, {"previous_response_id": "\u0000"}):
            assert server.post("/v1/responses", {"input": "a", **fields}).status_code == 404
        references = [{"type": "item_reference", "id": item_id} for item_id in ("msg_x_0", "", "\u00e9")]
        for reference in references:
            assert server.post("/v1/responses", {"input": [reference]}).status_code == 404
        for path in ("resp_x", "%00", "x" * 1000, "%ed%a0%80"):
            assert server.client.get(f"/v1/responses/{path}").status_code == 404
            assert server.client.delete(f"/v1/responses/{path}").status_code == 404
            assert server.client.post(f"/v1/responses/{path}/cancel").status_code == 404
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="demo", input=QUESTION, stream=True, max_output_tokens=0)
        assert caught.value.param == "max_output_tokens"
    warned = server.post("/v1/responses", {"input": "a", "max_output_tokens": 4, "colour": 1})
    assert warned.status_code == 200 and "colour" in warned.headers["x-evensong-warning"]
