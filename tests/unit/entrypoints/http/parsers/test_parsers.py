"""Every parser: the joined deltas are the whole at every cut, and what each family writes is read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from evensong.engine.frontend.reasoning import REASONING_FORMATS, Phase
from evensong.entrypoints.http.parsers.base import ChoiceParser, Delta, joined
from evensong.entrypoints.http.parsers.formats import TOOL_FORMATS
from evensong.entrypoints.http.parsers.reasoning import ReasoningParser
from evensong.entrypoints.http.parsers.tools import ToolParser

NAMES = ("get_weather", "add")
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich \\"}]</tool_call>", "days": [1, {"n": -2.5e3}]}}'
ARGUMENTS = '{"city": "Zürich \\"}]</tool_call>", "days": [1, {"n": -2.5e3}]}'
ADD = '{"arguments": {"a":1,"b" : 2}, "name": "add"}'
OTHER = '{"name": "nobody", "arguments": {"a": 1}}'


def parser(form: str, reasoning: str | None = None, phase: Phase = "undecided") -> ChoiceParser:
    thought = None if reasoning is None else ReasoningParser(REASONING_FORMATS[reasoning], phase)
    tools = None if form == "none" else ToolParser(TOOL_FORMATS[form], NAMES, lambda index: f"id{index}")
    return ChoiceParser(thought, tools)


def parsed(parts: Iterable[str], *setting: str) -> Delta:
    one = parser(*setting)  # type: ignore[arg-type]
    said = Delta()
    named: set[int] = set()
    for delta in [*map(one.push, parts), one.finish()]:
        for call in delta.tool_calls:
            # A name and an id come once, before anything else of the call.
            assert (call.index in named) == (call.name is None) == (call.id is None)
            named.add(call.index)
        said = joined(said, delta)
    assert one.called == bool(said.tool_calls)
    return said


def calls(said: Delta) -> list[tuple[str | None, str]]:
    assert [call.index for call in said.tool_calls] == list(range(len(said.tool_calls)))
    assert [call.id for call in said.tool_calls] == [f"id{index}" for index in range(len(said.tool_calls))]
    return [(call.name, call.arguments) for call in said.tool_calls]


# (parser, text, content, calls)
ADDED = ("add", '{"a":1,"b" : 2}')
ASKED = ("get_weather", ARGUMENTS)
READ: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [ASKED]),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{ADD}</tool_call>\n",
        "Let me see.",
        [ASKED, ADDED],
    ),
    ("hermes", f"<tool_call>{ADD}</tool_call> Done. \n", " Done. \n", [ADDED]),
    ("hermes", f"<tool_call>\n{OTHER}\n</tool_call>", f"<tool_call>\n{OTHER}\n</tool_call>", []),
    ("hermes", f"<tool_call>\n{OTHER}\n</tool_call><tool_call>{ADD}", f"<tool_call>\n{OTHER}\n</tool_call>", [ADDED]),
    ("hermes", f"<tool_call><tool_call>{ADD}</tool_call>", "<tool_call>", [ADDED]),
    ("hermes", '<tool_call>{"x": "<tool_call>' + ADD, '<tool_call>{"x": "', [ADDED]),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "a < b <tool> c\n ", "a < b <tool> c\n ", []),
    ("hermes", '<tool_call>\n{"name": "get_wea', '<tool_call>\n{"name": "get_wea', []),
    ("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b', "", [("add", '{"a": 1, "b')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}</tool_call>x', "x", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1</tool_call>', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_c', "", [("add", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "no"}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"id": 1, "name": "add", "x": [true, null], "arguments": {}}</tool_call>',
        "",
        [("add", "{}")],
    ),
    ("llama3_json", '{"name": "add", "parameters": {"a": "1; 2"}}', "", [("add", '{"a": "1; 2"}')]),
    (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {{}}}}; {ADD}',
        "",
        [("add", "{}"), ADDED],
    ),
    ("llama3_json", f"\n{ADD}\n{CALL}", "", [ADDED, ASKED]),
    ("llama3_json", f"[{ADD}, {CALL}]", "", [ADDED, ASKED]),
    ("llama3_json", f"The answer: {ADD}", f"The answer: {ADD}", []),
    ("llama3_json", f"{ADD}; and so on", "; and so on", [ADDED]),
    ("llama3_json", OTHER, OTHER, []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {ADD}]", "", [ASKED, ADDED]),
    ("mistral", f"Well. [TOOL_CALLS][{ADD}]", "Well.", [ADDED]),
    ("mistral", f"[TOOL_CALLS] [{OTHER}, {ADD}]", f"[TOOL_CALLS] [{OTHER}, {ADD}]", []),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    (
        "mistral_named",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{}}",
        "",
        [ASKED, ("add", "{}")],
    ),
    ("mistral_named", "[TOOL_CALLS]add{}", "", [("add", "{}")]),
    ("mistral_named", "[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]nobody[ARGS]{}", []),
    ("mistral_named", '[TOOL_CALLS]add[ARGS]{"a": [', "", [("add", '{"a": [')]),
    ("mistral_named", "[TOOL_CALLS]add[AR", "[TOOL_CALLS]add[AR", []),
    ("json", f"  {ADD}", "", [ADDED]),
    ("json", f"[{ADD},\n {CALL}]", "", [ADDED, ASKED]),
    ("json", f"[{ADD}, {OTHER}]", f", {OTHER}]", [ADDED]),
    ("json", '{"answer": [1, 2, {"name": "add"}]}', '{"answer": [1, 2, {"name": "add"}]}', []),
    ("json", " [] ", " [] ", []),
    ("json", "Hello {}", "Hello {}", []),
    ("none", f"<tool_call>{ADD}</tool_call>", f"<tool_call>{ADD}</tool_call>", []),
]


@pytest.mark.parametrize(("form", "text", "content", "expected"), READ)
def test_what_is_written_is_read(form: str, text: str, content: str, expected: list[tuple[str, str]]) -> None:
    said = parsed([text], form)
    assert (said.content, calls(said), said.reasoning) == (content, expected, "")


# (format, phase, text, reasoning, content)
THOUGHT: list[tuple[str, Phase, str, str, str]] = [
    ("deepseek_r1", "open", "First.\nThen.\n</think>\n\nIt is 4.", "First.\nThen.", "It is 4."),
    ("deepseek_r1", "open", "<think>\nFirst.</think>It is 4.", "First.", "It is 4."),
    ("deepseek_r1", "open", "It never ends \n", "It never ends", ""),
    ("deepseek_r1", "open", "It never ends </thi", "It never ends </thi", ""),
    ("deepseek_r1", "open", "</think>4", "", "4"),
    ("deepseek_r1", "open", " \n", "", ""),
    ("deepseek_r1", "open", "<thin", "<thin", ""),
    ("qwen3", "undecided", "\n<think>\nHm. < /think\n</think>\n\n4", "Hm. < /think", "4"),
    ("qwen3", "undecided", "It is 4, <think>not</think> 5.", "", "It is 4, <think>not</think> 5."),
    ("qwen3", "undecided", " \n<thi", "", " \n<thi"),
    ("qwen3", "open", "Hm.</think>4 </think>", "Hm.", "4 </think>"),
    ("qwen3", "done", "<think>4</think>", "", "<think>4</think>"),
    ("think", "undecided", "<think></think>", "", ""),
    ("mistral", "undecided", "[THINK]Hm.[/THINK]4", "Hm.", "4"),
]


@pytest.mark.parametrize(("form", "phase", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_is_told_from_the_answer(form: str, phase: Phase, text: str, reasoning: str, content: str) -> None:
    said = parsed([text], "none", form, phase)
    assert (said.reasoning, said.content) == (reasoning, content)


SETTINGS: list[tuple[str, tuple[str, ...]]] = [(text, (form,)) for form, text, _, _ in READ]
SETTINGS += [(text, ("none", form, phase)) for form, phase, text, _, _ in THOUGHT]
SETTINGS += [
    (f"{thought} a\n\n</think>\n{text}", (form, "qwen3", "undecided"))
    for form, text, _, _ in READ
    for thought in ("<think> \n", "")
]


@pytest.mark.parametrize(("text", "setting"), SETTINGS)
def test_the_deltas_join_to_the_whole_at_every_cut(text: str, setting: tuple[str, ...]) -> None:
    whole = parsed([text], *setting)
    assert parsed(text, *setting) == whole
    for at in range(len(text) + 1):
        assert parsed([text[:at], text[at:]], *setting) == whole
    dice = random.Random(text)
    for _ in range(20):
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(2, 9)))
        assert parsed([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], *setting) == whole


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        '"name"',
        ":",
        ",",
        '"add"',
        '"arguments"',
        "a",
        '"',
    ),
    *("[TOOL_CALLS]", "[ARGS]", "add", "<|python_tag|>", ";", "<think>", "</think>", ADD, CALL, OTHER, "\\", "1", "<"),
]


@pytest.mark.parametrize("form", [*TOOL_FORMATS, "none"])
def test_whatever_a_model_writes_joins_to_the_whole(form: str) -> None:
    dice = random.Random(form)
    for number in range(1500):
        text = "".join(dice.choices(PIECES, k=dice.randrange(1, 14)))
        setting = (form, "qwen3", dice.choice(["open", "undecided", "done"])) if number % 2 else (form,)
        whole = parsed([text], *setting)
        assert parsed(text, *setting) == whole, text
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(3))
        assert parsed([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], *setting) == whole, text


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_text_that_grows_is_passed_on(form: str) -> None:
    """Nothing is held that is certain: content and arguments come while they are written."""
    one = parser(form)
    assert one.push("Hello, ").content == "Hello,"
    assert one.push("world").content == " world"
    one = parser(form)
    begin = TOOL_FORMATS[form].head + TOOL_FORMATS[form].begin.replace("NAME", "add")
    assert not one.push(begin)
    first = one.push('{"a')
    assert [(call.id, call.name, call.arguments) for call in first.tool_calls] == [("id0", "add", '{"a')]
    assert [call.arguments for call in one.push('": "x').tool_calls] == ['": "x']


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_the_grammar_makes_is_read(form: str, parallel: bool) -> None:
    """Texts of the structural tag, written out by hand, are the calls that they should be."""
    schemas = {name: {"type": "object"} for name in NAMES}
    values = iter(['{"x": 1}', "{}", '{"y": []}'])
    text = written(TOOL_FORMATS[form].forced(schemas, parallel=parallel), values, 3 if parallel else 1)
    found = calls(parsed([text], form))
    assert found == [("get_weather", '{"x": 1}'), ("add", "{}"), ("get_weather", '{"y": []}')][: len(found)]
    assert len(found) == (3 if parallel else 1) and not parsed([text], form).content
    free = TOOL_FORMATS[form].free(schemas, parallel=parallel)
    assert all(tag["begin"].startswith(tuple(free["triggers"])) for tag in free["tags"])
    text = free["tags"][1]["begin"] + "{}" + free["tags"][1]["end"]
    assert calls(parsed([text], form)) == [("add", "{}")]
    assert json.dumps(free)


def written(form: dict[str, object], values: Iterable[str], count: int) -> str:
    """A text of a format: its calls in turn."""
    kind, tags = form["type"], form.get("tags")
    values = iter(values)
    if kind == "sequence":
        return "".join(written(one, values, count) for one in form["elements"])  # type: ignore[attr-defined]
    if kind == "const_string":
        return str(form["value"])
    if kind == "or":
        return written(form["elements"][0], values, 1)  # type: ignore[index]
    if kind == "tag":
        return f"{form['begin']}{next(values)}{form['end']}"
    assert kind == "tags_with_separator" and isinstance(tags, list)
    return str(form["separator"]).join(written(tags[index % len(tags)], values, 1) for index in range(count))


def test_a_long_text_takes_linear_time() -> None:
    """A megabyte in pieces of four characters, and texts that open calls without end."""
    for text in (
        f"<tool_call>{CALL[:-3]}" + "x" * 200_000,
        '<tool_call>{"k' * 3000,
        "<tool_call>{" * 3000,
        " \n" * 20_000,
    ):
        whole = parsed([text], "hermes")
        assert parsed([text[at : at + 4] for at in range(0, len(text), 4)], "hermes") == whole
