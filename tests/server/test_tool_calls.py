"""Tools and reasoning with the official client on the demo model; bad tools beside a streaming neighbour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from benchmarks.function_calls import FILES, FOLDER, cases, judge_all
from openai import OpenAI

from tests.server.harness import Server, Survivors, events

CHAT = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "What is the weather like in Oslo and in Lima, in Celsius?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"const": "é世👋"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "sum-of_two": SUM}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "sum-of_two"}}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def said(client: OpenAI, **fields: Any) -> Any:
    """The choice of a whole answer; the stream's deltas must join to the same."""
    fields = {"model": "demo", "messages": ASK, "max_tokens": 400, "seed": 5, "temperature": 0.7, **fields}
    whole = client.chat.completions.create(**fields).choices[0]
    content, reasoning, calls, reason = "", "", [], None
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning", "")
            for call in choice.delta.tool_calls or ():
                if call.function.name is not None:
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments
    message = whole.message
    assert (reason, content or None) == (whole.finish_reason, message.content or None)
    assert reasoning == (message.model_extra or {}).get("reasoning", "")
    assert calls == [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or ()]
    return whole


def check(calls: Any) -> None:
    for call in calls:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))


def test_required_calls_parse_and_match_their_schemas(client: OpenAI) -> None:
    for seed in range(2):
        choice = said(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert len(choice.message.tool_calls) == 1
        check(choice.message.tool_calls)


def test_the_clients_own_helper_reads_the_stream(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200}
    with client.chat.completions.stream(**fields) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    check([call])


def test_a_named_tool_is_the_one_that_is_called(client: OpenAI) -> None:
    choice = said(client, tools=TOOLS, tool_choice=NAMED)
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert call.function.name == "sum-of_two" and json.loads(call.function.arguments)["b"] == "é世👋"
    check([call])


def test_several_calls(client: OpenAI) -> None:
    choice = said(client, tools=TOOLS, tool_choice="required", max_tokens=120)
    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls) > 0
    check(calls if choice.finish_reason == "tool_calls" else calls[:-1])


def test_the_model_may_call_or_not(client: OpenAI) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for tools in (TOOLS, strict):
        choice = said(client, tools=tools, max_tokens=64)
        assert choice.message.content or choice.message.tool_calls
        check(choice.message.tool_calls or () if choice.finish_reason == "tool_calls" else ())


def test_results_go_back_to_the_model(client: OpenAI) -> None:
    called = said(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).message
    (call,) = called.tool_calls
    messages = [
        *ASK,
        called.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"},
    ]
    assert said(client, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=48).message.content
    assert said(client, messages=messages, max_tokens=48).message.content
    again = said(client, messages=messages, tools=TOOLS, tool_choice=NAMED).message.tool_calls
    assert again[0].id != call.id


def test_choices_and_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=ASK, tools=TOOLS, tool_choice=NAMED, n=2, logprobs=True, top_logprobs=2, max_tokens=200
    )
    for choice in answer.choices:
        check(choice.message.tool_calls)
        assert choice.logprobs and choice.logprobs.content
        text = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode()
        assert choice.message.tool_calls and choice.message.tool_calls[0].function.arguments in text  # type: ignore[union-attr]


def test_a_call_that_max_tokens_cuts(client: OpenAI, survivors: Survivors) -> None:
    with survivors.watch():
        whole = said(client, tools=TOOLS, tool_choice=NAMED).message.tool_calls[0].function.arguments
        lengths = []
        for max_tokens in (1, 9, 20, 24, 28):
            choice = said(client, tools=TOOLS, tool_choice=NAMED, max_tokens=max_tokens)
            assert choice.finish_reason == "length"
            for call in choice.message.tool_calls or ():
                assert whole.startswith(call.function.arguments.rstrip("\ufffd"))
                lengths.append(len(call.function.arguments))
        assert lengths == sorted(lengths) and len(set(lengths)) > 1


def test_reasoning_is_held_apart(client: OpenAI) -> None:
    outputs = {"regex": r"<think>\n[a-z ]{8,20}\n</think>\n\n[A-Z]{4,9}", "enable_in_reasoning": True}
    fields: dict[str, Any] = {"extra_body": {"structured_outputs": outputs}, "max_tokens": 80}
    choice = said(client, **fields)
    message = choice.message.model_extra
    assert message["reasoning"] == message["reasoning_content"] and 8 <= len(message["reasoning"].strip()) <= 20
    assert choice.message.content.isupper() and choice.message.content.isascii()
    stream = client.chat.completions.create(
        model="demo",
        messages=ASK,
        seed=5,
        temperature=0.7,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    thought, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        thought += "".join((c.delta.model_extra or {}).get("reasoning_content", "") for c in chunk.choices)
    assert thought == message["reasoning"]
    details = usage.completion_tokens_details if usage else None
    assert usage and details and details.reasoning_tokens
    assert 3 < details.reasoning_tokens < usage.completion_tokens
    hidden = said(client, extra_body={"structured_outputs": outputs, "include_reasoning": False}, max_tokens=80)
    assert hidden.message.content == choice.message.content and "reasoning" not in hidden.message.model_extra


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD: dict[str, list[dict[str, Any]]] = {
    "lone surrogates": [
        {"tools": [tool(name="\ud800")]},
        {"tools": [tool(description="\udfff")]},
        {"tools": [tool(parameters={"properties": {"\ud800": {}}})]},
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "\ud800"}}},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "\ud800"}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "\ud800", "function": {"name": "f", "arguments": ""}}]}
            ]
        },
    ],
    "malformed schemas": [
        {"tools": [tool(parameters=parameters)], "tool_choice": choice}
        for choice in ("auto", "required")
        for parameters in (
            [],
            {"type": "string"},
            {"properties": []},
            {"properties": {"a": {"type": "float"}}},
            {"properties": {"a": {"enum": []}}},
            {"required": "a"},
        )
    ],
    "choices": [
        {"tools": [tool()], "tool_choice": "any"},
        {"tool_choice": "required"},
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [tool()], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
    ],
    "schemas that cannot be enforced": [
        {"tools": [tool(parameters={"properties": {"a": schema}}, strict=strict)], "tool_choice": choice}
        for schema in ({"$ref": "#/$defs/missing"}, {"type": "string", "pattern": "(?=a)b"})
        for choice, strict in (("required", False), ("auto", True))
    ],
    "too much": [
        {"tools": [tool(name=f"f{index}") for index in range(200)]},
        {"tools": [tool(description="x" * 10**6)]},
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tools(server: Server, survivors: Survivors, name: str) -> None:
    with survivors.watch():
        for fields in BAD[name]:
            for stream in (False, True):
                body = json.dumps({"model": "demo", "messages": ASK, "max_tokens": 48, "stream": stream, **fields})
                headers = {"Content-Type": "application/json"}
                answer = server.client.post(CHAT, content=body, headers=headers)
                assert answer.status_code == 400, (str(fields)[:200], answer.text[:200])
                error = answer.json()["error"]
                assert error["param"] and error["message"] and error["param"].split("[")[0].split(".")[0] in body


def test_schemas_that_explode(server: Server, survivors: Survivors) -> None:
    """What they cost is bounded; whether that is enough for an answer is the grammar library's matter."""
    with survivors.watch():
        for schema in (
            {"type": "string", "pattern": "((a{1,2000}b){1,2000}c){1,2000}"},
            {"type": "string", "pattern": "(.*a){9000}"},
            {"type": "array", "minItems": 10**9, "items": {}},
            nested(26),
        ):
            fields = {"tools": [tool(parameters={"properties": {"a": schema}})], "tool_choice": "required"}
            answer = server.post(CHAT, {"model": "demo", "messages": ASK, "max_tokens": 48, **fields})
            assert answer.status_code == 400 or answer.json()["choices"][0]["finish_reason"] in ("length", "tool_calls")


def test_text_comes_while_it_is_written(server: Server) -> None:
    """Arguments come in many deltas: nothing waits for the end of a call."""
    body = {"model": "demo", "messages": ASK, "max_tokens": 200, "stream": True, "tools": TOOLS, "tool_choice": NAMED}
    with server.client.stream("POST", CHAT, json=body) as response:
        deltas = [event["choices"][0]["delta"] for event in events(response) if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert len(calls) > 4 and [("name" in call["function"]) for call in calls] == [True] + [False] * (len(calls) - 1)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the leaderboard's data is not beside this folder")
def test_calls_of_the_leaderboard(server: Server) -> None:
    """A sample of benchmarks/bfcl.py."""
    asked = [case for category in FILES for case in cases(category, limit=4)]
    verdicts = judge_all(server.url, "demo", asked, max_tokens=512, at_once=6)
    assert not [(verdict.name, verdict.faults) for verdict in verdicts if verdict.faults]
    assert sum(verdict.num_calls for verdict in verdicts) >= len(asked) == 12
