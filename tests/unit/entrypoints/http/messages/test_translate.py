"""MessageForm to ChatForm."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.entrypoints.http.messages.forms import MessageForm
from evensong.entrypoints.http.messages.translate import translate
from evensong.entrypoints.http.schemas import ChatForm
from evensong.protocol.errors import RequestError

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": "ä"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}


def translated(reasons: bool = False, **fields: Any) -> ChatForm:
    form = MessageForm.model_validate({"model": "demo", "max_tokens": 9, "messages": HELLO, **fields})
    return translate(form, reasons=reasons)


def test_a_conversation() -> None:
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "user", "content": [{"type": "text", "text": "Now.", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Sum.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me add."},
                USE,
                {**USE, "id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [{**RESULT, "tool_use_id": "t2", "is_error": True}, RESULT, {"type": "text", "text": "So?"}],
        },
    ]
    form = translated(messages=messages, system=[{"type": "text", "text": "You"}, {"type": "text", "text": "add."}])
    function = {"name": "add", "arguments": '{"a": "ä"}'}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ("t1", "t2")]
    assert form.messages == [
        {"role": "system", "content": "You\nadd."},
        {"role": "user", "content": "1 + 2?\nNow."},
        {"role": "assistant", "content": "Let me add.", "reasoning_content": "Sum.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: 3"},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "user", "content": "So?"},
    ]
    assert not form.continue_final_message


def test_fields() -> None:
    form = translated(
        system="Be brief.",
        tools=[TOOL, {**TOOL, "type": "custom"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        metadata={"user_id": "u"},
        stream=True,
    )
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert form.tools == [{"type": "function", "function": function}] * 2
    assert (form.tool_choice, form.parallel_tool_calls) == ("required", False)
    assert (form.max_completion_tokens, form.stop, form.temperature, form.top_k) == (9, ["x"], 0.5, 3)
    assert form.stream and (form.model_extra or {})["user"] == "u"
    named = translated(tools=[TOOL], tool_choice={"type": "tool", "name": "add"})
    assert named.tool_choice == {"type": "function", "function": {"name": "add"}}
    assert translated(tool_choice={"type": "none"}).tool_choice == "none"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    form = translated(messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert form.continue_final_message and form.add_generation_prompt is False


def test_thinking_is_bounded_where_its_end_is_known() -> None:
    thinking = {"type": "enabled", "budget_tokens": 8}
    for reasons, budget in ((True, 8), (False, None)):
        form = translated(reasons, thinking=thinking)
        assert form.thinking_token_budget == budget and form.chat_template_kwargs == {"enable_thinking": True}
    off = translated(True, thinking={"type": "disabled"})
    assert off.thinking_token_budget is None and off.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 4097}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages[1].content[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}, *HELLO]}, "messages[1].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [USE, USE]}, {"role": "user", "content": [RESULT]}]},
            "messages[0].content[1].id",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"system": "\ud800"}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": ["\ud800"]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": None}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config"),
        ({"metadata": 7}, "metadata"),
        ({"metadata": {"user_id": 7}}, "metadata.user_id"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        translated(**fields)
    assert caught.value.param == param and caught.value.status == 400
