"""`propertyNames`: which keys it allows, and the pattern for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from evensong.scheduler.grammar.schema.errors import malformed, refused
from evensong.scheduler.grammar.schema.formats import FORMAT_LENGTHS, TEXT_FORMATS
from evensong.scheduler.grammar.schema.pattern import PatternError, literal, none_of
from evensong.scheduler.grammar.schema.refs import NAMED, ONE
from evensong.scheduler.grammar.schema.values import MAX_LENGTH, count, pattern

_BYTES = LLTokenizer("byte")
_KNOWN = frozenset(("const", "enum", "format", "maxLength", "minLength", "pattern"))
_OTHERS = frozenset((*ONE, *NAMED, "$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "oneOf"))


class Names:
    """`pattern` matches the allowed names (None: there are none); `free` says that every name is allowed."""

    def __init__(self, wanted: Any, path: str) -> None:
        path = f"{path}/propertyNames"
        self.free, self.pattern = False, None
        if isinstance(wanted, bool):
            self.free = wanted
            return
        if not isinstance(wanted, dict):
            raise malformed("propertyNames", path, "must be a schema")
        for keyword in wanted:
            if keyword in _OTHERS:
                raise refused(keyword, path, "of 'propertyNames' only simple keywords are enforced")
        if wanted.get("type", "string") != "string" and "string" not in (wanted["type"] or ()):
            return
        if "const" in wanted or "enum" in wanted:
            self._listed(wanted, path)
            return
        found = [keyword for keyword in _KNOWN if keyword in wanted]
        if not found:
            self.free = True
        elif set(found) <= {"minLength", "maxLength"}:
            low, high = count(wanted, "minLength", path, MAX_LENGTH), count(wanted, "maxLength", path, MAX_LENGTH)
            self.pattern = f"^(?s:.{{{low or 0},{'' if high is None else high}}})$"
        elif found == ["pattern"]:
            self.pattern = pattern(wanted["pattern"], "pattern", path)
        elif found == ["format"] and wanted["format"] in TEXT_FORMATS and wanted["format"] not in FORMAT_LENGTHS:
            self.pattern = f"^(?:{TEXT_FORMATS[wanted['format']]})$"
        else:
            raise refused("propertyNames", path, "of its keywords only one at a time is enforced")

    def _listed(self, wanted: dict[str, Any], path: str) -> None:
        if len([keyword for keyword in _KNOWN if keyword in wanted]) > 1:
            raise refused("propertyNames", path, "of its keywords only one at a time is enforced")
        names = wanted["enum"] if "enum" in wanted else [wanted["const"]]
        if not isinstance(names, list):
            raise malformed("enum", path, "must be a list of values")
        try:
            texts = [literal(name) for name in names if isinstance(name, str)]
        except PatternError as error:
            raise refused("propertyNames", path, str(error)) from error
        if texts:
            self.pattern = f"^(?:{'|'.join(texts)})$"

    def allowed(self, names: Collection[str]) -> list[str]:
        """Those of `names` that it allows."""
        if self.free:
            return list(names)
        return [] if self.pattern is None else matching(self.pattern, names)


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Those of `names` that a pattern, as the backend spells it, matches."""
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_regex(pattern[1:-1]), log_level=0)
    found = []
    for name in names:
        text = list(name.encode())
        matcher.reset()
        if matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting():
            found.append(name)
    return found


def only_matches(pattern: str, names: list[str]) -> bool:
    """Whether a pattern matches nothing but some of `names`.

    Where all keys that a pattern allows are named already, the backend would begin one and find no way to go on.
    """
    found = matching(pattern, names)
    if not found:
        return False
    return never_both(pattern, f"^(?:{none_of(found)})$")


def never_both(pattern: str, other: str) -> bool:
    """Whether it is plain that no text matches both patterns."""
    both = {"type": "string", "allOf": [{"pattern": pattern}, {"pattern": other}]}
    return "nsatisfiable" in LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(both))
