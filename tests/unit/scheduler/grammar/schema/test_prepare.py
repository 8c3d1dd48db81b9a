"""What a schema means is what is let through; what cannot be enforced is refused by its name and place."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from evensong.protocol.errors import RequestError
from evensong.scheduler.grammar.schema.prepare import MAX_BYTES, prepare_schema, prepare_schema_object
from tests.unit.scheduler.grammar.schema.walking import Grammar

REFUSED = {
    "contains": {"contains": {"type": "string"}},
    "uniqueItems": {"uniqueItems": True},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "unevaluatedProperties": {"anyOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
    "unevaluatedItems": {"allOf": [{"prefixItems": [True]}], "unevaluatedItems": False},
    "not": {"not": {"type": "integer"}},
    "if": {"if": {"pattern": "a"}, "then": {"minLength": 3}},
    "oneOf": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "format": {"format": "idn-email"},
    "pattern": {"pattern": "^(?!a)"},
    "patternProperties": {"patternProperties": {"a": {"type": "string"}, "b": {"type": "number"}}},
    "propertyNames": {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": True}},
    "multipleOf": {"multipleOf": 123456789},
    "minimum": {"minimum": 2**60},
    "const": {"const": 12345678901234567890},
    "enum": {"enum": [1, 1e300]},
    "maxItems": {"maxItems": 10**9},
    "minLength": {"minLength": 10**12},
    "$ref": {"$ref": "https://example.com/schema"},
    "$schema": {"$schema": "https://example.com/dialect"},
    "divisibleBy": {"divisibleBy": 2},
    "dependentRequired": {"dependentRequired": {name: ["x"] for name in "abcdef"}},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name_and_place(keyword: str) -> None:
    schema = {"type": "object", "properties": {"deep/er": REFUSED[keyword]}}
    if keyword == "$schema":
        schema = REFUSED[keyword]
    with pytest.raises(RequestError) as refusal:
        prepare_schema(json.dumps(schema))
    assert (refusal.value.status, refusal.value.param) == (400, "structured_outputs")
    assert repr(keyword) in refusal.value.message
    assert "deep~1er" in refusal.value.message or keyword == "$schema"


MALFORMED = [
    ("{", "no JSON"),
    ("[]", "must be an object"),
    ('"text"', "must be an object"),
    ('{"type": "strin"}', "'type'"),
    ('{"type": []}', "'type'"),
    ('{"properties": []}', "'properties'"),
    ('{"properties": {"a": 1}}', "'a'"),
    ('{"required": "a"}', "'required'"),
    ('{"required": true}', "'required'"),
    ('{"enum": []}', "'enum'"),
    ('{"allOf": {}}', "'allOf'"),
    ('{"anyOf": []}', "'anyOf'"),
    ('{"minLength": -1}', "'minLength'"),
    ('{"minLength": 1.5}', "'minLength'"),
    ('{"maximum": "9"}', "'maximum'"),
    ('{"multipleOf": 0}', "'multipleOf'"),
    ('{"pattern": "("}', "'pattern'"),
    ('{"pattern": 1}', "'pattern'"),
    ('{"minimum": NaN}', "NaN"),
    ('{"type": "string", "type": "number"}', "twice"),
    ('{"enum": ["\\ud800"]}', "surrogate"),
    ('{"minimum": ' + "9" * 5000 + "}", "no JSON"),
]


@pytest.mark.parametrize(("text", "named"), MALFORMED)
def test_a_malformed_schema_is_refused(text: str, named: str) -> None:
    with pytest.raises(RequestError, match="JSON schema") as refusal:
        prepare_schema(text)
    assert named in refusal.value.message


# Each: a schema, texts that it lets through, texts that it does not.
MEANINGS: dict[str, tuple[Any, list[str], list[str]]] = {
    "siblings of a $ref": (
        {"$ref": "#/$defs/a~1b", "maxLength": 2, "$defs": {"a/b": {"type": "string"}}},
        ['"ab"'],
        ['"abc"', "1"],
    ),
    "siblings of a $ref before 2019": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "allOf": [{"$ref": "#/definitions/a", "maxLength": 2}],
            "definitions": {"a": {"type": "string"}},
        },
        ['"abc"'],
        ["1"],
    ),
    "the opposite of a $ref before 2019": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "not": {"$ref": "#/definitions/a", "type": "null"},
            "definitions": {"a": {"type": "string"}},
        },
        ["1", "null"],
        ['"a"'],
    ),
    "an anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
    "a $ref into no known keyword": (
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"const": 1}}}},
        ["1"],
        ["2"],
    ),
    "draft 4 bounds": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    "items as a list": (
        {"type": "array", "items": [{"const": 1}], "additionalItems": {"type": "null"}},
        ["[]", "[1]", "[1, null]"],
        ["[null]", "[1, 1]"],
    ),
    "annotations": ({"title": 1, "description": [], "default": {}, "x-more": {"type": 3}}, ["1"], []),
    "const beside type": ({"const": "a", "type": "string"}, ['"a"'], ['"b"']),
    "const against type": ({"enum": ["a", 1], "type": "integer"}, ["1"], ['"a"']),
    "raw characters": ({"enum": ["🎉", "漢字", "é"]}, ['"🎉"', '"漢字"', '"é"'], ['"e"']),
    "raw characters of a pattern": ({"type": "string", "pattern": "^[é🎉]漢$"}, ['"🎉漢"', '"é漢"'], ['"e漢"']),
    "a leap day": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
    "base64": ({"type": "string", "format": "byte"}, ['""', '"YQ=="', '"YWJj"'], ['"YQ="', '"a b "']),
    "a number's width": ({"type": "integer", "format": "int8"}, ["-128", "127"], ["128", "-129"]),
    "64 bits": ({"type": "integer", "format": "int64"}, [str(2**53), "0"], [str(2**53 + 1)]),
    "an exclusive bound below a fraction": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.75},
        ["0.5", "0.7", "0.75"],
        ["0", "0.76"],
    ),
    "fewer decimals than the bound": ({"type": "number", "maximum": 2.25}, ["2.2", "2", "2.25"], ["2.26", "2.3"]),
    "fewer decimals than the divisor": ({"type": "number", "multipleOf": 0.25}, ["0.5", "1", "0.75"], ["0.3", "0.7"]),
    "a class without a quote": ({"type": "string", "pattern": '^[^"\\\\]*$'}, ['"ab"'], ['"\\""', '"\\\\"']),
    "an escaped key": (
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        ['{"a": 1}', '{"b": "x"}', '{"b": "\\u00e9"}', '{"a": 1, "ab": "x"}'],
        ['{"a": "x"}', '{"\\u0061": "x"}'],
    ),
    "an escaped key beside a pattern": (
        {"type": "object", "patternProperties": {"^b": {"type": "integer"}}},
        ['{"b": 1}', '{"a": "x"}'],
        ['{"b": "x"}', '{"\\u0062": "x"}'],
    ),
    "a key with a quote": (
        {"type": "object", "properties": {'f"b': {"type": "integer"}}},
        ['{"f\\"b": 1}', '{"f": "x"}'],
        ['{"f\\"b": "x"}'],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": True}},
        ["{}", '{"ab": 1}'],
        ['{"b": 1}', '{"ba": 1}'],
    ),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 1}'],
        ['{"a": 1}'],
    ),
    "not": ({"type": "string", "not": {"enum": ["no", "nor"]}}, ['"yes"', '"n"', '"norm"'], ['"no"', '"nor"']),
    "not required": ({"type": "object", "not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
    "if, then and else": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        ['{"kind": "a", "x": 1}', '{"kind": "b", "y": 1}'],
        ['{"kind": "a", "y": 1}', '{"kind": "b", "x": 1}', '{"kind": "a"}'],
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "number", "minimum": 0}, {"type": "number", "maximum": 5}]},
        ["6", "-1"],
        ["3", "0"],
    ),
    "oneOf of definitions that a property tells apart": (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {
                "Cat": {
                    "type": "object",
                    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                    "required": ["kind", "lives"],
                },
                "Dog": {
                    "type": "object",
                    "properties": {"kind": {"const": "dog"}, "bark": {"type": "number", "multipleOf": 0.5}},
                    "required": ["kind"],
                },
            },
        },
        ['{"kind": "cat", "lives": 9}', '{"kind": "dog", "bark": 0.5}'],
        ['{"kind": "cat"}', '{"kind": "cow"}', "{}"],
    ),
    "unevaluatedProperties by itself": (
        {"type": "object", "properties": {"a": True}, "unevaluatedProperties": False},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "all keys of a pattern are named": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"minimum": 3}}},
        ['{"a": 3}', '{"b": "x"}'],
        ['{"a": 2}', '{"a": "x"}'],
    ),
    "true": (True, ["1", "{}", '"\\ud83c\\udf89"'], ["", '"\\ud83c"']),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_schema_lets_through_what_it_means(name: str) -> None:
    schema, good, bad = MEANINGS[name]
    grammar = Grammar(schema)
    assert [text for text in good if not grammar.accepts(text)] == []
    assert [text for text in bad if grammar.accepts(text)] == []


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {
        "properties": {"z": {"type": "integer"}},
        "required": ["z"],
        "allOf": [{"properties": {"m": {"type": "integer"}}, "required": ["m"]}],
    }
    grammar = Grammar(schema)
    assert grammar.accepts('{"z": 1, "m": 2}')
    assert not grammar.accepts('{"m": 2, "z": 1}')


VALUE = {"a": [1, {"b": "c"}], "d": {}}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(VALUE),
        json.dumps(VALUE, separators=(",", ":")),
        json.dumps(VALUE, indent=2),
        json.dumps(VALUE, indent=4),
        json.dumps(VALUE, indent="\t"),
    ],
)
def test_white_space_may_be_as_json_writers_make_it(text: str) -> None:
    assert Grammar({"type": "object"}).accepts(text)


def test_white_space_is_bounded() -> None:
    grammar = Grammar({"type": "object"})
    assert not grammar.accepts('{"a":' + " " * 41 + "1}")
    assert not grammar.accepts('{"a":\n\n1}')
    assert not grammar.accepts(' {"a":1}')
    assert not grammar.accepts('{"a":1}\n')


def test_compact_white_space_is_one_space_behind_a_separator() -> None:
    grammar = Grammar({"type": "object"}, any_whitespace=False)
    assert grammar.accepts('{"a": [1, 2],"b":2}')
    assert not grammar.accepts('{ "a":1}')
    assert not grammar.accepts('{"a":\n1}')


def test_a_pattern_says_what_white_space_is() -> None:
    grammar = Grammar({"type": "object"}, whitespace_pattern="[ ]{2}")
    assert grammar.accepts('{"a":  1}')
    assert not grammar.accepts('{"a": 1}')
    with pytest.raises(RequestError, match="whitespace_pattern"):
        Grammar({"type": "object"}, whitespace_pattern="(")
    with pytest.raises(RequestError, match="whitespace_pattern"):
        Grammar({"type": "object"}, whitespace_pattern="[ a]*")


def test_properties_that_are_not_named_can_be_forbidden() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": True}, "b": {}}}
    grammar = Grammar(schema, additional_properties=False)
    assert grammar.accepts('{"a": {"x": 1}, "b": 1}')
    assert not grammar.accepts('{"c": 1}')


def test_the_object_form_is_the_schema_with_its_options() -> None:
    schema = json.loads(prepare_schema_object('{"type": "object", "title": "no"}'))
    assert schema["type"] == "object" and "title" not in schema
    assert list(schema)[-1] == "x-guidance"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        False,
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_a_schema_without_values_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        prepare_schema(json.dumps(schema))


def test_a_recursive_schema_is_enforced() -> None:
    grammar = Grammar({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False})
    assert grammar.accepts('{"a": {"a": {}}}')
    assert not grammar.accepts('{"a": {"b": 1}}')


def nested(wrap: Any, levels: int) -> Any:
    """`wrap` around itself."""
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


def chain(link: Any, length: int) -> Any:
    """Definitions each of which leads to the next."""
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"type": "array"}}, "$ref": "#/$defs/d0"}


EXPLOSIONS: dict[str, Any] = {
    "bytes": {"enum": ["x" * 50] * (MAX_BYTES // 50)},
    "brackets": "[" * 90_000,
    "levels": nested(lambda inner: {"type": "array", "items": inner}, 80),
    "branches": nested(lambda inner: {"anyOf": [{"items": inner}, {"additionalProperties": inner}]}, 9),
    "items": {"type": "array", "minItems": 10**9},
    "characters": {"type": "string", "maxLength": 10**9},
    "counted repetitions": {"type": "string", "pattern": "((a{100}){100}){100}"},
    "states": {"type": "string", "pattern": "(a|b)*a(a|b){500}c", "minLength": 10},
    "alternatives": {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}": {"const": j}}, "required": [f"a{i}"]} for j in range(4)]}
            for i in range(8)
        ]
    },
    "numbers": {"allOf": [{"enum": list(range(200))}] * 20},
    "conditions": {
        "allOf": [
            {"if": {"properties": {"k": {"const": i}}, "required": ["k"]}, "then": {"required": [f"r{i}"]}}
            for i in range(30)
        ]
    },
    "patterns": {"patternProperties": {f"^k{i}_": {"type": "integer"} for i in range(300)}},
    "references": chain(lambda uri: {"type": "array", "items": {"$ref": uri}}, 1500),
    "bare references": chain(lambda uri: {"$ref": uri}, 2500),
    "divisor": {"type": "integer", "multipleOf": 2**29},
}


@pytest.mark.parametrize("name", EXPLOSIONS)
def test_what_explodes_is_refused_or_compiled_in_bounded_time(name: str) -> None:
    schema = EXPLOSIONS[name]
    began = time.process_time()
    try:
        Grammar(schema)
    except RequestError as refusal:
        assert refusal.status == 400
        assert len(refusal.message) < 600
    else:
        assert name == "branches"
    # Two thousand properties take half of a second; nothing takes longer than some of those.
    assert time.process_time() - began < 5
