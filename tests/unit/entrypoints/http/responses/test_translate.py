"""ResponseForm to ChatForm: fields under chat's names, complaints under those of the Responses API."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.entrypoints.http.responses.forms import ResponseForm
from evensong.entrypoints.http.responses.translate import input_items, translate
from evensong.entrypoints.http.schemas import ChatForm
from evensong.protocol.errors import RequestError

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}


def translated(**fields: Any) -> ChatForm:
    form = ResponseForm.model_validate({"input": "Hi", **fields})
    return translate(form, [], input_items(form))


def test_fields() -> None:
    form = translated(
        instructions="Be brief.",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=7,
        temperature=0.5,
        seed=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        user="u",
        stop=["x"],
        stream=True,
    )
    assert form.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}
    assert form.tools == [{"type": "function", "function": function}]
    assert form.tool_choice == {"type": "function", "function": {"name": "add"}}
    assert (form.parallel_tool_calls, form.max_completion_tokens, form.temperature, form.seed) == (False, 7, 0.5, 3)
    assert (form.logprobs, form.top_logprobs, form.stop, form.stream) == (True, 2, ["x"], True)
    assert (form.model_extra or {})["user"] == "u"


def test_background_is_made_as_it_comes() -> None:
    assert translated(background=True).stream is True
    assert translated().stream is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "custom", "name": "a"}]}, "tools[1]"),
        ({"tools": [{**TOOL, "parameters": {"maximum": float("inf")}}]}, "tools"),
        ({"tools": [{**TOOL, "name": 7}]}, "tools[0].name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"include": ["everything"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"background": True, "store": False}, "background"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        translated(**fields)
    assert caught.value.param == param and caught.value.status == 400


@pytest.mark.parametrize("name", ["prompt", "conversation", "context_management", "moderation"])
def test_fields_that_would_change_the_answer_are_refused(name: str) -> None:
    assert ResponseForm.model_validate({"input": "a", name: None}).unknown_fields() == []
    with pytest.raises(RequestError) as caught:
        ResponseForm.model_validate({"input": "a", name: "x"}).unknown_fields()
    assert caught.value.param == name


def test_unknown_fields_are_named() -> None:
    form = ResponseForm.model_validate({"input": "a", "service_tier": "flex", "colour": 1})
    assert form.unknown_fields() == ["colour"]
