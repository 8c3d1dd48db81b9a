"""structural_tag: free text with parts that must have a form, as xgrammar describes it, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar.base import invalid_grammar
from evensong.scheduler.grammar.lark import user_lark
from evensong.scheduler.grammar.schema.prepare import prepare_schema_object, schema_options

MAX_DEPTH = 32
MAX_FORMATS = 4096
_TEXT = "TEXT: /(.|\\n)*/"


def structural_tag_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a structural tag, as the library takes it. Raises RequestError naming what cannot be.

    Where the tag has `"special_tokens": true`, texts that are one of `special_tokens` stand for that token: models that
    were trained to write a marker as a token of its own do so then.
    """
    tag = parse_tag(params)
    writer = _Writer(params, special_tokens if _flag(tag, "special_tokens") else {})
    start = writer.expression(format_of(tag), 0)
    main = "\n".join([f"start: {start}", *writer.rules, _TEXT])
    grammars = [{"name": "structural_tag", "lark_grammar": main}, *writer.grammars]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def parse_tag(params: StructuredOutputsParams) -> dict[str, Any]:
    """The structural tag itself. Raises RequestError."""
    try:
        value = json.loads(str(params.structural_tag))
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not valid JSON: {error}") from error
    if not isinstance(value, dict) or value.get("type") != "structural_tag":
        raise _refused('it must be an object of type "structural_tag"')
    return value


def format_of(value: dict[str, Any]) -> dict[str, Any]:
    """The format that a structural tag describes, whichever form it has. Raises RequestError."""
    if "format" in value:
        _known(value, "structural_tag", "type", "format", "special_tokens")
        return _object(value["format"], "format")
    _known(value, "structural_tag", "type", "structures", "triggers", "special_tokens")
    tags = []
    for one in _list(value.get("structures"), "structures"):
        one = _object(one, "structures")
        _known(one, "structures", "begin", "schema", "end")
        content = {"type": "json_schema", "json_schema": one.get("schema", True)}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Writer:
    """Rules and nested grammars of one structural tag; every method gives an expression of Lark."""

    def __init__(self, params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._options = schema_options(params)
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._num_formats = 0
        self._kinds: dict[str, Callable[[dict[str, Any], int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, value: object, depth: int) -> str:
        """Any format, `depth` levels down."""
        form = _object(value, "format")
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise _refused(f"it is nested more than {MAX_DEPTH} levels deep, or has more than {MAX_FORMATS} formats")
        kind = form.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise _refused(f"the format {kind!r:.60} is not supported")
        return self._kinds[kind](form, depth)

    def _rule(self, body: str, flags: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{flags}: {body}")
        return name

    def _literal(self, text: str) -> str:
        parts = [text] if self._special is None else [part for part in self._special.split(text) if part]
        return " ".join(map(self._part, parts)) or '""'

    def _part(self, text: str) -> str:
        token_id = self._special_tokens.get(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def _text_up_to(self, text: str) -> str:
        """A rule of any text that ends where `text` first stands. No text contains a special token."""
        special = self._special is not None and self._special.search(text) is not None
        return self._rule(f"TEXT {self._literal(text)}", "" if special else "[lazy]")

    def _const_string(self, form: dict[str, Any], _: int) -> str:
        _known(form, "const_string", "type", "value")
        return self._literal(_text(form, "value"))

    def _json_schema(self, form: dict[str, Any], _: int) -> str:
        _known(form, "json_schema", "type", "json_schema")
        text = json.dumps(form.get("json_schema", True), ensure_ascii=False)
        return self._rule(f"%json {prepare_schema_object(text, **self._options)}")

    def _regex(self, form: dict[str, Any], _: int) -> str:
        _known(form, "regex", "type", "pattern")
        return self._rule(f"/{llguidance.regex_to_lark(_text(form, 'pattern'), '')}/")

    def _grammar(self, form: dict[str, Any], _: int) -> str:
        _known(form, "grammar", "type", "grammar")
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": user_lark(_text(form, "grammar"))})
        return f"@{name}"

    def _any_text(self, form: dict[str, Any], _: int) -> str:
        _known(form, "any_text", "type")
        return "TEXT"

    def _sequence(self, form: dict[str, Any], depth: int) -> str:
        _known(form, "sequence", "type", "elements")
        return " ".join(self.expression(one, depth + 1) for one in _list(form.get("elements"), "elements"))

    def _or(self, form: dict[str, Any], depth: int) -> str:
        _known(form, "or", "type", "elements")
        return _either(self.expression(one, depth + 1) for one in _list(form.get("elements"), "elements"))

    def _tag(self, form: dict[str, Any], depth: int) -> str:
        return self._tag_after("", form, depth)

    def _tag_after(self, trigger: str, form: dict[str, Any], depth: int) -> str:
        """A tag whose beginning stands already, up to the end of `trigger`."""
        _known(form, "tag", "type", "begin", "content", "end")
        begin = self._literal(_text(form, "begin").removeprefix(trigger))
        content = _object(form.get("content"), "content")
        end = _text(form, "end")
        if content.get("type") == "any_text" and end:
            return f"{begin} {self._text_up_to(end)}"
        return f"{begin} {self.expression(content, depth + 1)} {self._literal(end)}"

    def _triggered_tags(self, form: dict[str, Any], depth: int) -> str:
        _known(form, "triggered_tags", "type", "triggers", "tags", "at_least_one", "stop_after_first")
        triggers = [_string(one, "triggers") for one in _list(form.get("triggers"), "triggers")]
        if "" in triggers:
            raise _refused("a trigger is empty")
        options = []
        for value in _list(form.get("tags"), "tags"):
            tag = _object(value, "tags")
            begin = _text(tag, "begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise _refused(f"no trigger begins the tag {begin!r:.60}")
            options.append(f"{self._text_up_to(trigger)} {self._tag_after(trigger, tag, depth)}")
        tags, once, needed = _either(options), _flag(form, "stop_after_first"), _flag(form, "at_least_one")
        if once:
            return tags if needed else f"({tags} | TEXT)"
        return f"{tags}{'+' if needed else '*'} TEXT"

    def _tags_with_separator(self, form: dict[str, Any], depth: int) -> str:
        _known(form, "tags_with_separator", "type", "tags", "separator", "at_least_one", "stop_after_first")
        tag = _either(self._tag(_object(one, "tags"), depth) for one in _list(form.get("tags"), "tags"))
        separator = self._literal(_text(form, "separator"))
        tags = tag if _flag(form, "stop_after_first") else f"{tag} ({separator} {tag})*"
        return tags if _flag(form, "at_least_one") else f"({tags})?"


def _either(options: Any) -> str:
    return f"({' | '.join(options)})"


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused(f"{name} must be an object")
    return value


def _list(value: object, name: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise _refused(f"{name} must be a list that is not empty")
    return value


def _text(form: Mapping[str, Any], name: str) -> str:
    return _string(form.get(name), name)


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _refused(f"{name} must be text")
    return value


def _flag(form: Mapping[str, Any], name: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise _refused(f"{name} must be true or false")
    return value


def _known(form: Mapping[str, Any], kind: str, *names: str) -> None:
    unknown = sorted(set(form) - set(names))
    if unknown:
        raise _refused(f"{kind} cannot hold {unknown[0]!r:.60}")


def _refused(reason: str) -> RequestError:
    return invalid_grammar(f"structural_tag cannot be used: {reason}")
