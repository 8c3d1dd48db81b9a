"""Chat templates: what they may do, and what bad messages get."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.engine.frontend.chat_messages import MAX_MESSAGES
from evensong.engine.frontend.chat_template import ChatTemplate
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


def test_a_final_message_is_continued_exactly() -> None:
    for content in ("The answer is", "ends with spaces  ", "two\nlines\n", "<s1>", ""):
        for source in (CHAT_TEMPLATE, CHAT_TEMPLATE.replace("message.content", "message.content | trim")):
            messages = [USER, {"role": "assistant", "content": content}]
            text = render(source, messages, continue_final_message=True)
            assert text == f"<s0>user\nhi<s1>\n<s0>assistant\n{content}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(CHAT_TEMPLATE, [{"role": "user", "content": parts}], continue_final_message=True).endswith("a\nb")


def test_a_continued_message_may_hold_any_character() -> None:
    content = "\ue001\ue000"
    assert render("{{ messages[0].content }}!", [{**USER, "content": content}], continue_final_message=True) == content
    every = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match="cannot be continued"):
        render("{{ messages[0].content }}", [{**USER, "content": every}], continue_final_message=True)


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[0].content * 2 }}"])
def test_a_message_that_is_not_shown_once_cannot_be_continued(source: str) -> None:
    with pytest.raises(RequestError, match="cannot be continued") as caught:
        render(source, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_continuing_and_a_new_answer_exclude_each_other() -> None:
    with pytest.raises(RequestError) as caught:
        render(CHAT_TEMPLATE, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"
    assert render(CHAT_TEMPLATE, continue_final_message=True, add_generation_prompt=False).endswith("user\nhi")


def test_keywords_and_documents_reach_the_template() -> None:
    source = "{{ enable_thinking }} {% for document in documents or [] %}{{ document.title }};{% endfor %}"
    documents = [{"title": "a"}, {"title": "b"}]
    assert render(source, documents=documents, kwargs={"enable_thinking": False}) == "False a;b;"
    assert render(source, kwargs={}) == " "
    with pytest.raises(RequestError, match="takes no documents"):
        render(CHAT_TEMPLATE, documents=documents)
    assert render(CHAT_TEMPLATE, documents=[], kwargs={"unknown": 1})


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "bos_token", "range"]
    + ["raise_exception", "max_model_len", "model", "api_key", "a b", "", "__class__()"],
)
def test_keywords_that_are_not_the_templates_own(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(CHAT_TEMPLATE, kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_roles_and_names_pass_through() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.tool_call_id }} {% endfor %}"
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
    ]
    assert render(source, messages) == "developer:be brief: tool:42:call_1 "
    with pytest.raises(RequestError):
        render(source, [{"role": "tool", "content": "42", "tool_call_id": 1}])
