"""Chat templates: what they may do, and what bad messages get."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.engine.frontend.chat_template import MAX_MESSAGES, ChatTemplate
from evensong.protocol.errors import RequestError
from evensong.testing.byte_tokenizer import CHAT_TEMPLATE

USER = {"role": "user", "content": "hi"}


def render(source: str | None, messages: Any = (USER,), **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<b>"}).render(list(messages), **options)


def test_messages_and_generation_prompt() -> None:
    messages = [{"role": "system", "content": "be"}, USER]
    assert render(CHAT_TEMPLATE, messages) == "<s0>system\nbe<s1>\n<s0>user\nhi<s1>\n<s0>assistant\n"
    assert render(CHAT_TEMPLATE, messages, add_generation_prompt=False).endswith("hi<s1>\n")


def test_text_parts_are_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}{{ eos_token }}") == "<b>"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{{ {'b': 1, 'a': '<é>'} | tojson }}") == '{"b": 1, "a": "<é>"}'
    assert render("{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{% if tools %}tools{% else %}none{% endif %}") == "none"
    assert render("{{ messages[0].name }}", [{**USER, "name": "ann"}]) == "ann"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_a_template_can_refuse() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_whatever_a_template_does_is_a_400(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.status == 400


def test_output_is_bounded() -> None:
    source = "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="more than 1000 characters"):
        ChatTemplate(source, {}, max_characters=1000).render([USER])


@pytest.mark.parametrize("source", [None, "", "{% for %}", "{{ unclosed"])
def test_no_template_or_a_damaged_one(source: str | None) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


SURROGATE = "\ud83d"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0]"),
        ([{"role": "user", "content": [3]}], "messages[0]"),
        ([{"role": "user", "content": SURROGATE}], "messages[0]"),
        ([{"role": SURROGATE, "content": "x"}], "messages[0]"),
        ([{**USER, "name": SURROGATE}], "messages[0]"),
        ([{**USER, "name": 3}], "messages[0].name"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([USER] * (MAX_MESSAGES + 1), "messages"),
    ],
)
def test_bad_messages(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(CHAT_TEMPLATE, messages)
    assert caught.value.param == param
    caught.value.message.encode()  # can be sent


def test_messages_must_be_a_list() -> None:
    with pytest.raises(RequestError, match="must be a list"):
        ChatTemplate(CHAT_TEMPLATE, {}).render("hi")  # type: ignore[arg-type]
