"""Tools in prompts: templates that know them, templates that do not, and calls of earlier turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evensong.engine.frontend.chat_messages import check_messages
from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.engine.frontend.chat_tools import MAX_CHARACTERS, check_tools
from evensong.protocol.errors import RequestError
from evensong.testing.byte_tokenizer import CHAT_TEMPLATE

USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "A sum.", "parameters": {"type": "object"}, "strict": True},
}
SHOWN = {"type": "function", "function": {"name": "add", "description": "A sum.", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}},
        {"id": "c2", "function": {"name": "add", "arguments": ""}},
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": f"c{index}", "content": str(index)} for index in (1, 2)]


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, {}).render(list(messages), **options)


def test_a_tool_is_shown_without_what_the_server_does_with_it() -> None:
    (tool,) = check_tools([TOOL])
    assert tool.strict and tool.shown() == SHOWN
    (bare,) = check_tools([{"type": "function", "function": {"name": "now"}}])
    assert bare.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert check_tools(None) == check_tools([]) == []


def test_the_size_of_all_tools_is_bounded() -> None:
    def sized(length: int) -> list[Any]:
        return [{"type": "function", "function": {"name": "f", "description": "x" * length}}]

    check_tools(sized(MAX_CHARACTERS - 200))
    with pytest.raises(RequestError, match="at most"):
        check_tools(sized(MAX_CHARACTERS))


def test_a_template_that_knows_tools_gets_them() -> None:
    source = (
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}|{% for m in messages %}{{ m | tojson }}{% endfor %}"
    )
    text = render(source, USER, CALLED, *RESULTS, tools=[SHOWN])
    tools, _, messages = text.partition("|")
    assert json.loads(tools) == [SHOWN]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    empty = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call, empty]}
    assert messages == "".join(json.dumps(one, ensure_ascii=False) for one in (USER, said, *check_messages(RESULTS)))
    assert render(source, USER).startswith("|")


def test_a_template_that_knows_none_gets_text() -> None:
    text = render(CHAT_TEMPLATE, {"role": "system", "content": "Be brief."}, USER, CALLED, *RESULTS, tools=[SHOWN])
    system, user, assistant, results, head = text.split("<s0>")[1:]
    assert system.startswith("system\nBe brief.\n\n") and f"<tools>\n{json.dumps(SHOWN)}\n</tools>" in system
    assert (
        '<tool_call>\n{"name": "<name of the function>", "arguments": <arguments as a JSON object>}\n</tool_call>'
        in system
    )
    assert (user, head) == ("user\nhi<s1>\n", "assistant\n")
    calls = ('{"a": "é"}', "{}")
    shown = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {a}}}\n</tool_call>' for a in calls)
    assert assistant == f"assistant\n{shown}<s1>\n"
    answers = "\n".join(f"<tool_response>\n{n}\n</tool_response>" for n in (1, 2))
    assert results == f"user\n{answers}<s1>\n"
    # Without a system message there is one now; without tools the history is text all the same.
    assert render(CHAT_TEMPLATE, USER, tools=[SHOWN]).startswith("<s0>system\nYou may call functions")
    assert render(CHAT_TEMPLATE, USER, CALLED, *RESULTS) == text[text.index("<s0>user") :]
    # In the model's own way of writing calls.
    style = {"begin": '{"name": "NAME", "parameters": ', "end": "}"}
    assert '{"name": "add", "parameters": {"a": "é"}}' in render(
        CHAT_TEMPLATE, USER, CALLED, tools=[SHOWN], tool_style=style
    )


def test_what_a_caller_has_is_left_alone() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, CALLED, *RESULTS]
    before = json.dumps(messages)
    assert render(CHAT_TEMPLATE, *messages, tools=[SHOWN]) == render(CHAT_TEMPLATE, *messages, tools=[SHOWN])
    assert json.dumps(messages) == before


def test_a_message_with_calls_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        render(
            "{% for m in messages %}{{ m.content }}{{ tools }}{% endfor %}", USER, CALLED, continue_final_message=True
        )


def test_reasoning_of_earlier_turns_reaches_the_template() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        assert render(source, {"role": "assistant", "content": "4", name: "hm"}) == "hm"


def test_the_effort_is_the_templates_matter() -> None:
    source = "{{ reasoning_effort | default('-') }}"
    assert [render(source, USER, reasoning_effort=one) for one in ("high", "none", None)] == ["high", "-", "-"]
    for template, effort in (("x", "high"), (source, "huge")):
        with pytest.raises(RequestError) as caught:
            render(template, USER, reasoning_effort=effort)
        assert caught.value.param == "reasoning_effort"
