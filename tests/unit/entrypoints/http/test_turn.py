"""Chats with tools and reasoning over a core whose answers are scripts, whole and streamed, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest

from evensong.config.sections import REASONING_PARSERS, TOOL_PARSERS
from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.reasoning import REASONING_FORMATS, Phase
from evensong.entrypoints.http.parsers.choose import tool_format
from evensong.entrypoints.http.parsers.formats import TOOL_FORMATS
from evensong.entrypoints.http.parsers.reasoning import ReasoningTokens
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer
from tests.unit.entrypoints.http.serving import Served, TalkingClient, run

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
MUL = {"type": "function", "function": {"name": "mul", "description": "A product.", "strict": True}}
ARGUMENTS = '{"a":  1, "b": "Grüße 👋"}'
CALL = '<tool_call>\n{"name": "add", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
NAMED = {"type": "function", "function": {"name": "add"}}


def talking(answer: str | list[int]) -> Any:
    return functools.partial(TalkingClient, answer=answer)


def streamed(events: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """The message that a stream's deltas make, and its finish_reason."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        reason = choice["finish_reason"] or reason
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for key in ("reasoning", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message, reason


async def both(served: Served, **fields: Any) -> tuple[dict[str, Any], str]:
    """Message and finish_reason, whole; the stream must say the same."""
    whole = (await served.chat(max_tokens=400, **fields))["choices"][0]
    events = await served.stream(CHAT, **{"messages": HELLO, "max_tokens": 400, **fields})
    assert streamed(events) == (whole["message"], whole["finish_reason"])
    return whole["message"], whole["finish_reason"]


def test_a_call_is_told_from_the_text() -> None:
    async def body(served: Served) -> None:
        for choice in (None, "auto"):
            message, reason = await both(served, tools=[ADD], tool_choice=choice)
            assert reason == "tool_calls" and message["content"] == "Well."
            (call,) = message["tool_calls"]
            assert call["type"] == "function" and call["id"].startswith("call_")
            assert call["function"] == {"name": "add", "arguments": ARGUMENTS}
        # The same conversation has the same ids; another one has others.
        again, _ = await both(served, tools=[ADD])
        other, _ = await both(served, tools=[ADD], messages=[{"role": "user", "content": "ho"}])
        assert again["tool_calls"] == [call] and other["tool_calls"][0]["id"] != call["id"]
        assert (await both(served, tools=[ADD], tool_choice="none")) == (
            {"role": "assistant", "content": f"Well.\n{CALL}", "refusal": None},
            "stop",
        )
        # A call of a tool that the request does not have is text.
        message, reason = await both(served, tools=[MUL])
        assert reason == "stop" and message["content"] == f"Well.\n{CALL}" and "tool_calls" not in message

    run(body, talking(f"Well.\n{CALL}"))


def test_choices_logprobs_and_usage_beside_calls() -> None:
    async def body(served: Served) -> None:
        fields: dict[str, Any] = {"tools": [ADD], "n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 400}
        whole = await served.chat(**fields)
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]]
        assert len(set(ids)) == 2
        events = await served.stream(CHAT, messages=HELLO, stream_options={"include_usage": True}, **fields)
        for choice in whole["choices"]:
            assert streamed(events, choice["index"])[0] == choice["message"]
            shown = [
                entry
                for event in events
                for c in event["choices"]
                if c["index"] == choice["index"] and c["logprobs"]
                for entry in c["logprobs"]["content"]
            ]
            assert shown == choice["logprobs"]["content"]
        assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert "completion_tokens_details" not in whole["usage"]

    run(body, talking(CALL))


def test_a_call_that_max_tokens_cuts() -> None:
    async def body(served: Served) -> None:
        size = len(CALL.encode())
        for max_tokens in range(1, size, 7):
            whole = (await served.chat(tools=[ADD], max_tokens=max_tokens))["choices"][0]
            events = await served.stream(CHAT, messages=HELLO, tools=[ADD], max_tokens=max_tokens)
            assert whole["finish_reason"] == "length"
            assert streamed(events) == (whole["message"], "length")
            if max_tokens > size // 2:
                assert ARGUMENTS.startswith(whole["message"]["tool_calls"][0]["function"]["arguments"].rstrip("\ufffd"))

    run(body, talking(CALL))


def test_the_grammar_that_the_core_is_given() -> None:
    async def body(served: Served) -> None:
        async def tag(**fields: Any) -> Any:
            await served.chat(max_tokens=400, **fields)
            given = served.core.script.added[-1].params.structured_outputs
            return None if given is None else json.loads(given.structural_tag)["format"]

        assert await tag() is None and await tag(tools=[ADD]) is None
        assert await tag(tools=[ADD, MUL], tool_choice="none") is None
        style = TOOL_FORMATS["hermes"]
        add = ADD["function"]["parameters"]  # type: ignore[index]
        mul = {"type": "object", "properties": {}, "additionalProperties": False}
        schemas = {"add": add, "mul": mul}
        assert await tag(tools=[ADD, MUL], tool_choice="required") == style.forced(schemas, parallel=True)
        fields = {"tools": [ADD, MUL], "parallel_tool_calls": False}
        assert await tag(**fields, tool_choice="required") == style.forced(schemas, parallel=False)
        one = style.forced({"add": add}, parallel=False)
        assert await tag(tools=[ADD, MUL], tool_choice=NAMED) == one
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
        assert await tag(tools=[ADD, MUL], tool_choice=allowed, parallel_tool_calls=False) == one
        # A strict tool's arguments match its schema whenever the model calls it.
        loose = {"add": {"type": "object"}, "mul": mul}
        assert await tag(tools=[ADD, MUL]) == style.free(loose, parallel=True)
        del loose["mul"]
        assert await tag(tools=[ADD], parallel_tool_calls=False) == style.free(loose, parallel=False)

    run(body, talking(CALL))


def test_the_reason_of_a_named_call_is_openais() -> None:
    async def body(served: Served) -> None:
        message, reason = await both(served, tools=[ADD, MUL], tool_choice=NAMED)
        assert reason == "stop" and message["tool_calls"][0]["function"]["name"] == "add"
        message, reason = await both(served, tools=[ADD, MUL], tool_choice="required")
        assert reason == "tool_calls" and message["content"] is None

    run(body, talking(CALL))


def test_markers_that_are_special_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        TOOL_FORMATS, "hermes", dataclasses.replace(TOOL_FORMATS["hermes"], openers=("<s5>",), closer="<s6>")
    )
    text = '{"name": "add", "arguments": {}}'

    async def body(served: Served) -> None:
        message, _ = await both(served, tools=[ADD])
        assert message["content"] == "a" and message["tool_calls"][0]["function"]["name"] == "add"
        # Without tools all special tokens are left out, as ever.
        assert (await both(served))[0]["content"] == f"a{text}"
        assert (await both(served, skip_special_tokens=False))[0]["content"] == f"a<s5>{text}<s6><s7>"

    run(body, talking([*byte_ids("a"), 5, *byte_ids(text), 6, 7]))


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools[0].type", {"tools": [{"type": "web_search", "function": {"name": "f"}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    *(
        ("tools[0].function.name", {"tools": [function(name=name)]})
        for name in (None, "", "a b", "x" * 65, "\ud800", 3, "a\n")
    ),
    ("tools[1].function.name", {"tools": [function(), function()]}),
    ("tools[0].function.description", {"tools": [function(description=3)]}),
    ("tools[0].function.strict", {"tools": [function(strict="yes")]}),
    *(
        ("tools[0].function.parameters", {"tools": [function(parameters=p)]})
        for p in ([], "x", {"type": "string"}, {"type": 3})
    ),
    *(
        ("tools[0].function.parameters.properties.a", {"tools": [function(parameters={"properties": {"a": one}})]})
        for one in (
            3,
            None,
            "string",
            [],
            {"type": "float"},
            {"enum": []},
            {"required": "a"},
            {"properties": []},
            {"anyOf": []},
        )
    ),
    ("tools", {"tools": [function(description="\ud800")]}),
    ("tools", {"tools": [function(parameters={"properties": {"\ud800": {}}})]}),
    ("tools", {"tools": [function(name=f"f{index}") for index in range(129)]}),
    ("tools", {"tools": [function(description="x" * 200_000)]}),
    ("tools", {"tools": [3]}),
    ("tools", {"tools": "x"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": NAMED}),
    ("tool_choice", {"tool_choice": NAMED, "tools": [MUL]}),
    *(
        ("tool_choice", {"tool_choice": choice, "tools": [ADD]})
        for choice in (
            "any",
            "",
            {},
            {"type": "function"},
            {"type": "function", "function": {"name": 3}},
            {"type": "allowed_tools"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}},
            3,
            [NAMED],
        )
    ),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("reasoning_effort", {"reasoning_effort": "huge"}),
    ("parallel_tool_calls", {"parallel_tool_calls": 3}),
    *(
        (f"messages[0].tool_calls{where}", {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]})
        for where, calls in (
            ("", "x"),
            ("", [{}] * 129),
            ("[0]", [3]),
            ("[0]", [{"type": "custom", "function": {"name": "f", "arguments": "{}"}}]),
            ("[0].function.name", [{"function": {"arguments": "{}"}}]),
            ("[0].id", [{"id": 3, "function": {"name": "f", "arguments": "{}"}}]),
            ("[0]", [{"function": {"name": "\ud800", "arguments": "{}"}}]),
            ("[0]", [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]),
            *(
                ("[0].function.arguments", [{"function": {"name": "f", "arguments": text}}])
                for text in (None, {"a": 1}, "{", "[1]", "3", '{"a": NaN}', "[" * 5000)
            ),
        )
    ),
    ("messages[0].content", {"messages": [{"role": "assistant", "content": None}]}),
]


def test_what_is_refused() -> None:
    async def body(served: Served) -> None:
        for param, fields in REFUSED:
            for stream in (False, True):
                answer = await served.post(CHAT, **{"messages": HELLO, "stream": stream, **fields})
                assert answer.status_code == 400, (fields, answer.text[:200])
                # The form's own checks name the field, without the place in it.
                named = answer.json()["error"]["param"]
                assert named == param or named == param.split("[")[0], (fields, named)
        assert not served.core.script.added

    run(body)


def test_a_server_can_refuse_tools_that_it_need_not_call() -> None:
    async def body(served: Served) -> None:
        answer = await served.post(CHAT, messages=HELLO, tools=[ADD])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
        await served.chat(tools=[ADD], tool_choice="required")

    run(body, enable_auto_tool_choice=False)


THOUGHT = "<think>\nOne and one.\n</think>\n\n"


def test_reasoning_is_held_apart() -> None:
    async def body(served: Served) -> None:
        message, reason = await both(served, tools=[ADD])
        assert message["reasoning"] == message["reasoning_content"] == "One and one."
        assert message["content"] is None and message["tool_calls"] and reason == "tool_calls"
        usage = (await served.chat(max_tokens=400))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len(THOUGHT.rstrip())}
        events = await served.stream(CHAT, messages=HELLO, max_tokens=400, stream_options={"include_usage": True})
        assert events[-1]["usage"] == usage
        cut = await served.chat(max_tokens=9)
        assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
        assert cut["choices"][0]["message"]["content"] == "" and cut["choices"][0]["finish_reason"] == "length"
        message, _ = await both(served, include_reasoning=False)
        assert message == {"role": "assistant", "content": CALL, "refusal": None}
        # A message that goes on has no reasoning before it.
        goes_on = [*HELLO, {"role": "assistant", "content": "Well"}]
        message, _ = await both(served, messages=goes_on, continue_final_message=True)
        assert message["content"] == THOUGHT + CALL

    run(body, talking(THOUGHT + CALL), engine={"reasoning_parser": "qwen3"})


def test_without_a_reasoning_parser_it_is_content() -> None:
    async def body(served: Served) -> None:
        message, _ = await both(served)
        assert message == {"role": "assistant", "content": THOUGHT, "refusal": None}

    run(body, talking(THOUGHT))


def test_the_flags_name_what_there_is() -> None:
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)
    assert {*TOOL_PARSERS, "mistral_named"} == set(TOOL_FORMATS)


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        (None, None, "hermes"),
        (None, "{{ messages }}", "hermes"),
        (None, "… <tool_call>\\n{\"name\": …", "hermes"),
        (None, "{{ '<|python_tag|>' }}", "llama3_json"),
        (None, "{{ '[TOOL_CALLS] [' }}", "mistral"),
        (None, "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_named"),
        ("mistral", "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_named"),
        ("mistral", None, "mistral"),
        ("json", "<tool_call>", "json"),
    ],
)  # fmt: skip
def test_the_format_is_the_flags_or_the_templates(name: str | None, template: str | None, expected: str) -> None:
    assert tool_format(name, template).name == expected


@pytest.mark.parametrize(
    ("phase", "text", "count"),
    [
        ("open", "hm</think>4", 10),
        ("open", "hm", 2),
        ("undecided", " <think>hm</think>4</think>", 18),
        ("undecided", "<thinner</think>", 0),
        ("undecided", "4", 0),
        ("done", "<think>a</think>", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(phase: Phase, text: str, count: int) -> None:
    ids, texts = byte_ids(text), TokenTexts(byte_tokenizer())
    for size in (1, 3, len(ids)):
        counter = ReasoningTokens(REASONING_FORMATS["qwen3"], phase, texts)
        assert sum(counter.add(ids[at : at + size]) for at in range(0, len(ids), size)) == count
