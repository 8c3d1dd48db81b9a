"""Grammars walked byte by byte: the tokens of these tests are the 256 bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from evensong.scheduler.grammar.limits import parser_limits
from evensong.scheduler.grammar.schema.prepare import prepare_schema

BYTES = LLTokenizer("byte")


class Grammar:
    """What a schema, prepared, lets through."""

    def __init__(self, schema: Any, **options: Any) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.matcher = LLMatcher(BYTES, prepare_schema(text, **options), log_level=0, limits=parser_limits())
        assert not self.matcher.is_error(), self.matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Whether `text` is let through to its end."""
        self.matcher.reset()
        given = list(text.encode())
        return bool(self.matcher.try_consume_tokens(given) == len(given) and self.matcher.is_accepting())

    def accepts_value(self, value: Any) -> bool:
        """Whether `value` is let through in some order of its keys."""
        return any(self.accepts(json.dumps(each, ensure_ascii=False)) for each in orders(value))


def orders(value: Any, most: int = 120) -> Iterator[Any]:
    """`value` with the keys of its objects in other orders as well, up to `most` of them."""
    yield from islice(_orders(value), most)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for chosen in islice(product(*[list(islice(_orders(each), 6)) for each in value.values()]), 24):
            for keys in permutations(zip(value, chosen, strict=True)):
                yield dict(keys)
    elif isinstance(value, list):
        yield from (list(each) for each in product(*[list(islice(_orders(item), 6)) for item in value]))
    else:
        yield value
