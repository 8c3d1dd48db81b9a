"""Grammars that users wrote, in Lark or GBNF, to the library's Lark."""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import any_to_lark

from evensong.protocol.errors import RequestError
from evensong.scheduler.grammar.base import invalid_grammar
from evensong.scheduler.grammar.limits import one_line
from evensong.scheduler.grammar.schema.prepare import prepare_schema_object

# The library's converter takes a time that grows with the square of this, in Python: a tenth of a second here.
MAX_RULES = 500
_RULE = re.compile(r"::=|^[ \t]*[?!]?[A-Za-z_][\w-]*(?:\[[^\]]*\])?(?:\.\d+)?[ \t]*:", re.MULTILINE)
_SCHEMA = re.compile(r"%json\s*")


def user_lark(grammar: str) -> str:
    """A grammar with a `start` rule. Raises RequestError naming what cannot be.

    Schemas that it embeds are checked as all schemas are.
    """
    num_rules = sum(1 for _ in _RULE.finditer(grammar))
    if num_rules > MAX_RULES:
        raise invalid_grammar(f"grammar has {num_rules} rules, at most {MAX_RULES} are allowed")
    try:
        lark = str(any_to_lark(grammar))
    except Exception as error:  # the library's converter raises what comes
        raise _unreadable(one_line(str(error))) from error
    return _with_checked_schemas(lark)


def _with_checked_schemas(lark: str) -> str:
    pieces, position = [], 0
    for found in _SCHEMA.finditer(lark):
        if found.start() < position:
            continue  # within a schema
        try:
            _, length = json.JSONDecoder().raw_decode(lark[found.end() :])
        except (ValueError, RecursionError) as error:
            raise _unreadable(f"what follows %json is not valid JSON: {error}") from error
        end = found.end() + length
        pieces += [lark[position : found.start()], "%json ", prepare_schema_object(lark[found.end() : end])]
        position = end
    return "".join([*pieces, lark[position:]])


def _unreadable(reason: str) -> RequestError:
    return invalid_grammar(f"grammar cannot be read: {reason}")
