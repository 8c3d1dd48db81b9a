"""What each backend accepts and refuses, kind by kind; the structural tags of both forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar.llguidance_backend import unanchored
from evensong.testing.byte_tokenizer import byte_ids
from tests.unit.scheduler.grammar.matching import compiled, matches, vocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tag(name: str, schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>"}


def of_format(form: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


TAGS = [tag("f", {"type": "integer"}), tag("g", {"enum": ["a"]})]
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json": (
        {"json": PERSON},
        ['{"name": "Zoë 😀", "age": 3}', '{"name":"","age":-1}', '{\n  "name": "a",\n  "age": 12\n}'],
        ['{"name": "a"}', '{"name": "a", "age": 1.5}', '{"name": "a", "age": 1, "b": 2}', "[]", ""],
    ),
    "json_object": ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '"a"', "{"]),
    "choice": ({"choice": ["yes", "no", 'a "b" \\ 日本']}, ["yes", "no", 'a "b" \\ 日本'], ["ye", "yesno", "maybe"]),
    "regex": ({"regex": r"[a-c]{2,3}\d"}, ["ab1", "abc9"], ["a1", "abcd1", "ab"]),
    "grammar": (
        {"grammar": 'root ::= item ("," item)*\nitem ::= [0-9]+ | "x"'},
        ["1", "12,x,3"],
        ["", "1,", ",1", "y"],
    ),
    "tags between separators": (
        of_format({"type": "tags_with_separator", "tags": TAGS, "separator": ";", "at_least_one": True}),
        ["<f>1</f>", '<g>"a"</g>;<f>-2</f>'],
        ["", "<f>1</f>;", "<f>x</f>", "text <f>1</f>"],
    ),
    "one tag": (
        of_format({"type": "tags_with_separator", "tags": TAGS, "separator": ";", "stop_after_first": True}),
        ["<f>1</f>", ""],
        ["<f>1</f>;<f>1</f>"],
    ),
    "triggered tags": (
        of_format({"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": TAGS}),
        ["", "some text < and more", 'a <f>1</f> b <g>"a"</g>'],
        ["a <f>x</f>", "a <f", "a <g>1</g>"],
    ),
    "a sequence": (
        of_format(
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "A:"},
                    {
                        "type": "or",
                        "elements": [{"type": "regex", "pattern": "[0-9]"}, {"type": "const_string", "value": "z"}],
                    },
                ],
            }
        ),
        ["A:1", "A:z"],
        ["A:", "A:zz", "1"],
    ),
    "the older form": (
        {
            "structural_tag": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
        ["text", "a <f>1</f>"],
        ["a <f>x</f>"],
    ),
}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("name", CASES)
def test_a_backend_accepts_what_it_should_and_nothing_else(name: str, backend: str) -> None:
    fields, good, bad = CASES[name]
    grammar = compiled(backend, **fields)
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


def test_lark_is_taken_too() -> None:
    grammar = compiled(grammar='start: WORD ("-" WORD)*\nWORD: /[a-z]+/')
    assert matches(grammar, "ab-c") and not matches(grammar, "ab-")


def test_a_tag_around_any_text_ends_at_its_end() -> None:
    form = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
    grammar = compiled(**of_format({"type": "sequence", "elements": [form, {"type": "const_string", "value": "!"}]}))
    assert matches(grammar, "<t>a < b</t>!") and not matches(grammar, "<t>a</t>b</t>!")


def test_a_nested_grammar() -> None:
    grammar = compiled(
        **of_format(
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "x="},
                    {"type": "grammar", "grammar": 'root ::= "1" | "2"'},
                ],
            }
        )
    )
    assert matches(grammar, "x=2") and not matches(grammar, "x=3")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("^a$", "a"), ("a", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("$", ""), ("^", ""), ("^^a", "^a")],
)
def test_anchors_at_the_ends_say_nothing(pattern: str, expected: str) -> None:
    assert unanchored(pattern) == expected


BAD: dict[str, dict[str, Any]] = {
    "regex": {"regex": "((("},
    "a look-ahead": {"regex": "(?=a)b"},
    "grammar": {"grammar": "root ::= ((("},
    "an unknown rule": {"grammar": "root ::= nothing"},
    "schema": {"json": "{not json"},
    "a schema that is a list": {"json": "[]"},
    "no tag": {"structural_tag": {"type": "other"}},
    "an unknown format": of_format({"type": "magic"}),
    "a tag without content": of_format({"type": "tag", "begin": "a", "end": "b"}),
    "no trigger": of_format({"type": "triggered_tags", "triggers": ["<x"], "tags": TAGS}),
    "an empty trigger": of_format({"type": "triggered_tags", "triggers": [""], "tags": TAGS}),
    "an unknown key": of_format({"type": "any_text", "surprise": 1}),
    "too deep": of_format(json.loads('{"type":"sequence","elements":[' * 40 + '{"type":"any_text"}' + "]}" * 40)),
    "a schema in a tag": of_format(tag("f", {"type": "wrong"})),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        compiled(**BAD[name])
    assert refused.value.status == 400 and refused.value.param == "structured_outputs"
    assert "\n" not in refused.value.message and len(refused.value.message) < 600


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(" * 30_000},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(x+x+)+y" * 2000},
        {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": 'root ::= "a"{1000000}'},
        {"grammar": "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(3000)) + '\nroot ::= r0\nr3000 ::= "a"'},
    ],
    ids=["deep regex", "nested bounds", "long regex", "deep grammar", "huge bound", "many rules"],
)
def test_what_explodes_is_refused_or_small(fields: dict[str, Any]) -> None:
    """By counts: the same on every machine."""
    answers = []
    for _ in range(2):
        try:
            compiled(**fields).start()
            answers.append("compiled")
        except RequestError as error:
            answers.append(error.message)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a"},
        {"type": "number", "multipleOf": 3},
        {"type": "array", "items": [{}]},
        {"type": "array", "minItems": 10_000},
        {"anyOf": [{"type": "string", "maxLength": 3}]},
        {"properties": {"a": {"not": {}}}},
    ],
)
def test_xgrammar_refuses_keywords_that_it_does_not_enforce(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="xgrammar|between"):
        compiled("xgrammar", json=schema)


def test_xgrammar_refuses_them_in_structural_tags_too() -> None:
    sequence = {"type": "sequence", "elements": [tag("f", {"type": "string", "pattern": "a"})]}
    with pytest.raises(RequestError, match="'pattern' is not enforced by xgrammar"):
        compiled("xgrammar", **of_format(sequence))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": ["a", 1]},
        {"choice": [""]},
        {"regex": ""},
        {"regex": 3},
        {"json": 3},
        {"json": {"a": "\ud800"}},
        {"regex": "a", "backend": "magic"},
        {"regex": "a" * 300_000},
        {"json_object": "yes"},
    ],
)
def test_params_that_say_nothing_or_too_much_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        StructuredOutputsParams(**fields)
    assert refused.value.param == "structured_outputs"


SPECIAL = vocabulary().tokenizer.token_to_id("<s5>")


@pytest.mark.parametrize("trigger", ["<s5>", "<s5>f="])
def test_markers_may_be_special_tokens(trigger: str) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [{"type": "tag", "begin": "<s5>f=", "content": content, "end": "<s5>"}],
    }
    marked = {"type": "structural_tag", "format": form, "special_tokens": True}
    matcher = compiled(structural_tag=marked).start()
    for token_id in [*byte_ids("so "), SPECIAL, *byte_ids("f=12"), SPECIAL, *byte_ids(" done")]:
        assert matcher.accept(token_id), token_id
    assert matcher.fill(vocabulary().new_row())
    # As ordinary text the marker is no marker.
    matcher = compiled(structural_tag=marked).start()
    assert all(matcher.accept(token_id) for token_id in byte_ids("<s5>f=x"))
    # Without the extension it is text, and the special token has no place.
    plain = compiled(structural_tag={"type": "structural_tag", "format": form}).start()
    assert not plain.accept(SPECIAL)
