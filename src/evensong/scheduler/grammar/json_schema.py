"""A user's JSON schema to what the library takes (in the works)."""

from __future__ import annotations

import json

import llguidance

from evensong.protocol.errors import RequestError


def prepare_schema_object(
    text: str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
) -> str:
    """The schema's own text, checked."""
    try:
        json.loads(text)
    except ValueError as error:
        raise RequestError(f"the schema is not valid JSON: {error}", param="structured_outputs") from error
    return text


def prepare_schema(
    text: str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
) -> str:
    """The grammar of a schema."""
    return str(llguidance.LLMatcher.grammar_from_json_schema(prepare_schema_object(text)))
