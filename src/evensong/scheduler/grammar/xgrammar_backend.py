"""xgrammar: the second backend, asked for by name. It imports torch, so it is loaded with the first such request.

It ignores keywords of JSON Schema that it does not know, and enforces some in part: those that it is known to enforce
are taken here (tests/unit/scheduler/grammar has samples of each), and all others are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import PARAM, StructuredOutputsParams
from evensong.scheduler.grammar.base import (
    Backend,
    Bitmask,
    CompiledGrammar,
    Matcher,
    alternatives,
    invalid_grammar,
    never,
)
from evensong.scheduler.grammar.structural_tag import format_of, parse_tag
from evensong.scheduler.grammar.vocabulary import Vocabulary, clear_bits, has_bit

# Deeper schemas, and larger ones, are left to the default backend, whose compiler counts its steps.
MAX_CHARACTERS = 16 * 1024
MAX_DEPTH = 24
MAX_BOUND = 256
_MAX_WHITESPACE = 16

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$id"})
_ENFORCED = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
    | {"enum", "const", "anyOf", "$ref", "$defs", "definitions"}
)
_BOUNDS = ("minItems", "maxItems")


class XGrammar(Backend):
    """One compiler of the library's. Raises RequestError where the library is not installed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import xgrammar  # noqa: PLC0415  # an optional dependency, which imports torch
        except ImportError as error:
            raise RequestError(
                "the backend xgrammar is not installed here (pip install 'evensong[xgrammar]')", param=PARAM
            ) from error
        self._library: Any = xgrammar
        self._vocabulary = vocabulary
        special = set(vocabulary.special_ids)
        # Tokens without text are special ones to the library: nothing that a grammar says can reach them.
        tokens = [b"" if i in special else own for i, own in enumerate(vocabulary.token_bytes)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size + 1, stop_token_ids=[vocabulary.end_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, params: StructuredOutputsParams, cancelled: Callable[[], bool] = never) -> CompiledGrammar:
        if params.whitespace_pattern is not None or params.disable_additional_properties:
            raise invalid_grammar("the backend xgrammar has no whitespace_pattern and no disable_additional_properties")
        texts = [params.json, params.regex, params.grammar, params.structural_tag, *(params.choice or ())]
        if sum(len(text) for text in texts if isinstance(text, str)) > MAX_CHARACTERS:
            raise invalid_grammar(
                f"{params.kind} has over {MAX_CHARACTERS} characters, the most that xgrammar gets here"
            )
        try:
            return _Compiled(self._compile(params), self._library, self._vocabulary)
        except RequestError:
            raise
        except Exception as error:  # the library has errors of many kinds
            raise invalid_grammar(f"{params.kind} cannot be compiled: {_reason(error)}") from error

    def _compile(self, params: StructuredOutputsParams) -> Any:
        compiler = self._compiler
        match params.kind:
            case "json" | "json_object":
                schema = json.loads(params.json) if isinstance(params.json, str) else {"type": "object"}
                check_schema(schema)
                return compiler.compile_json_schema(
                    json.dumps(schema, ensure_ascii=False),
                    any_whitespace=not params.disable_any_whitespace,
                    strict_mode=False,
                    max_whitespace_cnt=None if params.disable_any_whitespace else _MAX_WHITESPACE,
                )
            case "regex":
                return compiler.compile_regex(str(params.regex))
            case "choice":
                return compiler.compile_grammar(f"root ::= {alternatives(params.choice or ())}")
            case "grammar":
                return compiler.compile_grammar(str(params.grammar))
            case _:
                form = format_of(parse_tag(params))
                _check_schemas_in(form)
                tag = {"type": "structural_tag", "format": form}
                return compiler.compile_structural_tag(json.dumps(tag, ensure_ascii=False))


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: Any, library: Any, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._library = library
        self._vocabulary = vocabulary

    def start(self) -> Matcher:
        return _Matcher(self._library.GrammarMatcher(self._compiled), self._vocabulary)


class _Matcher(Matcher):
    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def fill(self, row: Bitmask) -> bool:
        self._matcher.fill_next_token_bitmask(row.view(np.int32).reshape(1, -1))
        end_id = self._vocabulary.end_id
        may_end = has_bit(row, end_id)
        clear_bits(row, [end_id])
        return may_end

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


def _check_schemas_in(form: Any, depth: int = 0) -> None:
    """Checks the schemas of a structural tag's formats."""
    if depth > MAX_DEPTH:
        raise invalid_grammar(f"structural_tag is nested more than {MAX_DEPTH} levels deep")
    if isinstance(form, list):
        for one in form:
            _check_schemas_in(one, depth + 1)
    elif isinstance(form, dict) and form.get("type") == "json_schema":
        check_schema(form.get("json_schema", True))
    elif isinstance(form, dict):
        for one in form.values():
            _check_schemas_in(one, depth + 1)


def check_schema(schema: Any, depth: int = 0) -> None:
    """Raises RequestError naming the first keyword that this backend would not enforce."""
    if depth > MAX_DEPTH:
        raise invalid_grammar(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid_grammar("a schema must be an object or a boolean")
    for keyword in schema:
        if keyword not in _ENFORCED and keyword not in _ANNOTATIONS:
            raise invalid_grammar(f"the keyword {keyword!r:.60} is not enforced by xgrammar")
    for keyword in _BOUNDS:
        bound = schema.get(keyword, 0)
        if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= MAX_BOUND:
            raise invalid_grammar(f"{keyword} must be between 0 and {MAX_BOUND}")
    if "items" in schema and isinstance(schema["items"], list):
        raise invalid_grammar("the keyword 'items' with a list is not enforced by xgrammar")
    for keyword in ("properties", "$defs", "definitions"):
        for own in _values(schema, keyword):
            check_schema(own, depth + 1)
    for own in schema.get("anyOf", ()):
        check_schema(own, depth + 1)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            check_schema(schema[keyword], depth + 1)
    if len(schema.keys() & {"enum", "const", "anyOf", "$ref"}) > 1 or (
        schema.keys() & {"enum", "const", "anyOf", "$ref"} and schema.keys() & {"properties", "items", "required"}
    ):
        raise invalid_grammar("enum, const, anyOf and $ref are enforced by xgrammar only where they stand alone")


def _values(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise invalid_grammar(f"{keyword} must be an object")
    return list(value.values())


def _reason(error: Exception) -> str:
    """Without the time of day and the place in the library's source, which would make each answer another one."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[\d:]+\] \S+: (Check failed: .* is false: )?", "", text)[:400]
