"""The grammar that a format makes allows the calls that its parser reads, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evensong.entrypoints.http.parsers.formats import TOOL_FORMATS
from evensong.entrypoints.http.parsers.tools import ToolParser
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar.base import Matcher
from evensong.scheduler.grammar.llguidance_backend import LLGuidance
from evensong.scheduler.grammar.vocabulary import Vocabulary
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer

A, T = {"a": {"type": "integer"}}, {"t": {"enum": ["é👋"]}}
SCHEMAS: dict[str, Any] = {
    "add": {"type": "object", "properties": A, "required": ["a"], "additionalProperties": False},
    "say": {"type": "object", "properties": T, "required": ["t"], "additionalProperties": False},
}
TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(lambda: TOKENIZER, TOKENIZER.vocab_size)


def allows(form: dict[str, Any], text: str) -> bool:
    """Whether `text` is a whole output of the format."""
    tag = StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    matcher: Matcher = LLGuidance(VOCABULARY).compile(tag).start()
    return all(map(matcher.accept, byte_ids(text))) and matcher.fill(VOCABULARY.new_row())


def wrapped(name: str, *calls: tuple[str, str]) -> str:
    form = TOOL_FORMATS[name]
    return form.head + form.between.join(form.begin.replace("NAME", n) + a + form.end for n, a in calls) + form.tail


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls(name: str) -> None:
    one, other = ("add", '{"a": 1}'), ("say", '{"t": "é👋"}')
    several = TOOL_FORMATS[name].forced(SCHEMAS, parallel=True)
    single = TOOL_FORMATS[name].forced(SCHEMAS, parallel=False)
    for calls in ([one], [other], [one, other], [other, other, one]):
        text = wrapped(name, *calls)
        assert allows(several, text)
        assert allows(single, text) == (len(calls) == 1)
        parser = ToolParser(TOOL_FORMATS[name], SCHEMAS, str)
        delta = parser.push(text)
        assert [(call.name, call.arguments) for call in delta.tool_calls] == calls and not delta.content
        assert not parser.finish()
    for wrong in (
        ("add", "{}"),
        ("add", '{"a": "1"}'),
        ("say", '{"a": 1}'),
        ("nobody", "{}"),
        ("add", '{"a": 1, "b": 2}'),
    ):
        assert not allows(several, wrapped(name, wrong)) and not allows(single, wrapped(name, wrong))
    for text in ("", "Hello", "{}", wrapped(name, one) + " and"):
        assert not allows(several, text) and not allows(single, text)
    named = TOOL_FORMATS[name].forced({"add": SCHEMAS["add"]}, parallel=False)
    assert allows(named, wrapped(name, one)) and not allows(named, wrapped(name, other))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_that_the_model_decides_on(name: str) -> None:
    form = TOOL_FORMATS[name].free(SCHEMAS, parallel=True)
    calls = {tag["begin"]: tag["end"] for tag in form["tags"]}
    add, say = calls
    good = add + '{"a": 1}' + calls[add]
    for text in ("", "Hello, {} <b>", f"Well. {good}", f"{good} then\n" + say + '{"t": "é👋"}' + calls[say] + "."):
        assert allows(form, text), text
    for text in (add + "{}" + calls[add], good + say + '{"a": 1}' + calls[say], f"Well. {form['triggers'][0]}?"):
        assert not allows(form, text), text
    once = TOOL_FORMATS[name].free(SCHEMAS, parallel=False)
    assert allows(once, "Hello") and allows(once, f"Well. {good}") and not allows(once, good + good)
