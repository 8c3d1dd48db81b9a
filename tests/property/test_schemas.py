"""Random schemas against another validator: what a grammar lets through is valid, and what is valid is let through."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evensong.protocol.errors import RequestError
from tests.unit.scheduler.grammar.schema.walking import Grammar

TEXTS = ["", "a", "b", "ab", "abc", "foo", "a1", '"', "\\", "é", "🎉", "a\nb", "x y", "2021-02-29", "1.2.3.4", "a@b.c"]
NUMBERS = [0, 1, -1, 2, 3, 5, 7, 10, 100, 0.5, -0.5, 1.5, 2.25, 99, 0.75, -10, 0.1, 3.75, 2.2, -0.7]
KEYS = ["a", "b", "ab", "foo", 'x"y', "é"]
PATTERNS = [
    "^a",
    "b$",
    "^[a-z]+$",
    "^a|b$",
    "[0-9]",
    '^[^"]*$',
    "^.{1,3}$",
    "\\d",
    "^\\S*$",
    "[^\\\\]$",
    "^$",
    "\\u00e9",
]
FORMATS = ["date", "time", "ipv4", "email", "uuid", "hostname", "uri", "json-pointer"]
TYPES = ["string", "number", "integer", "object", "array", "null", "boolean"]
MAX_BYTES = 160

numbers = st.sampled_from(NUMBERS)
values = st.recursive(
    st.sampled_from(TEXTS) | numbers | st.sampled_from([True, False, None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
simple = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(1, 5),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(FORMATS),
        "minimum": numbers,
        "exclusiveMinimum": numbers,
        "maximum": numbers,
        "exclusiveMaximum": numbers,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25, 1.5, 0.1, 10]),
        "enum": st.lists(values, min_size=1, max_size=3),
        "required": st.lists(st.sampled_from(KEYS), max_size=2, unique=True),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(0, 3),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 3),
        "dependentRequired": st.dictionaries(
            st.sampled_from(KEYS), st.lists(st.sampled_from(KEYS), max_size=2, unique=True), max_size=1
        ),
    },
).map(lambda schema: dict(list(schema.items())[:4]))


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with others inside."""
    named = st.dictionaries(st.sampled_from(KEYS), inner, min_size=1, max_size=3)
    keywords = st.fixed_dictionaries(
        {},
        optional={
            "properties": named,
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
            "propertyNames": st.sampled_from([{"pattern": "^a"}, {"maxLength": 2}, {"enum": ["a", "foo"]}]),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "oneOf": st.lists(inner, min_size=1, max_size=3),
            "not": inner,
            "if": inner,
            "then": inner,
        },
    ).map(lambda schema: dict(list(schema.items())[:3]))
    return st.builds(lambda first, second: {**first, **second}, simple, keywords)


schemas = st.recursive(simple | st.booleans(), compound, max_leaves=5)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas, instances=st.lists(values, min_size=4, max_size=8), seed=st.integers(0, 2**32))
def test_a_grammar_lets_through_what_another_validator_calls_valid(
    schema: Any, instances: list[Any], seed: int
) -> None:
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    try:
        grammar = Grammar(schema)
    except RequestError as refusal:
        assert refusal.status == 400
        if "no value satisfies" in refusal.message:
            assert not any(map(validator.is_valid, instances)), schema
        return
    for instance in instances:
        assert grammar.accepts_value(instance) == validator.is_valid(instance), (schema, instance)
    text = written(grammar, random.Random(seed))
    # Numbers past double precision are read differently by everyone.
    if text is not None and not re.search(r"[0-9.]{15}|[0-9][eE]", text):
        assert validator.is_valid(json.loads(text)), (schema, text)


def written(grammar: Grammar, draw: random.Random) -> str | None:
    """A text drawn from the grammar, byte by byte; None where it does not end in time. It never comes to a dead end."""
    matcher, text = grammar.matcher, bytearray()
    matcher.reset()
    while len(text) < MAX_BYTES:
        mask = matcher.compute_bitmask()
        if matcher.is_accepting() and draw.random() < 0.4:
            return text.decode()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            assert matcher.is_accepting(), text
            return text.decode()
        likely = [byte for byte in allowed if chr(byte) in ('"}]' if len(text) > MAX_BYTES // 2 else '"}],:ab1 0')]
        text.append(draw.choice(likely if likely and draw.random() < 0.7 else allowed))
        assert matcher.consume_token(text[-1])
    return text.decode() if matcher.is_accepting() else None
