"""`not`, `if` with `then` and `else`, and `oneOf` whose options overlap: written as alternatives.

A grammar cannot say "not this", but for many schemas what is left can be said: of a type the other types, of a bound
the other side, of a list of texts a pattern for all others. Where that is so the negation is written out; elsewhere the
keyword is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evensong.protocol.errors import RequestError
from evensong.scheduler.grammar.schema import arrays as schema_arrays
from evensong.scheduler.grammar.schema import objects as schema_objects
from evensong.scheduler.grammar.schema import values as schema_values
from evensong.scheduler.grammar.schema.errors import malformed, refused, step
from evensong.scheduler.grammar.schema.pattern import PatternError, none_of

if TYPE_CHECKING:
    from evensong.scheduler.grammar.schema.rewrite import Rewriter

MAX_DEPTH = 8
MAX_ALTERNATIVES = 64
MAX_SPLIT = 6
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_CONSTRAINTS = frozenset(("oneOf", "if", "then", "else", "pattern", "format", "multipleOf", "$dynamicRef"))
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTS = {
    "minLength": ("string", "maxLength"),
    "maxLength": ("string", "minLength"),
    "minItems": ("array", "maxItems"),
    "maxItems": ("array", "minItems"),
    "minProperties": ("object", "maxProperties"),
    "maxProperties": ("object", "minProperties"),
}
Inner = Callable[..., Any]


def conditions(
    rewriter: Rewriter, node: dict[str, Any], path: str, base: str, inner: Inner, written: dict[str, Any]
) -> None:
    """Writes the conditions of `node` as alternatives. Raises RequestError."""
    if "not" in node:
        rewriter.note("not", path)
        rewriter.conjoin(written, _any(Negation(rewriter, "not", path).of(node["not"], step(path, "not"), base)))
    if "if" not in node or not ("then" in node or "else" in node):
        return
    rewriter.note("if", path)
    holds = inner(node["if"], "if")
    fails = _any(Negation(rewriter, "if", path).of(node["if"], step(path, "if"), base))
    then = inner(node["then"], "then") if "then" in node else True
    otherwise = inner(node["else"], "else") if "else" in node else True
    rewriter.conjoin(written, _any([_all(holds, then), _all(fails, otherwise)]))


def split(
    rewriter: Rewriter, options: list[Any], written: list[Any], path: str, base: str
) -> list[tuple[Any, list[Any]]]:
    """The options of a `oneOf`, as `written`, each with what says that none of the others holds."""
    if len(options) > MAX_SPLIT:
        raise refused("oneOf", path, f"its options are not provably apart, and there are more than {MAX_SPLIT}")
    negation = Negation(rewriter, "oneOf", path)
    not_these = [_any(negation.of(each, f"{path}/oneOf/{index}", base)) for index, each in enumerate(options)]
    return [
        (each, [other for place, other in enumerate(not_these) if place != index]) for index, each in enumerate(written)
    ]


def alternatives(apart: list[tuple[Any, list[Any]]], beside: dict[str, Any], *, late: bool) -> Any:
    """What `split` returns and `beside`, what stands beside the `oneOf`, as one schema.

    The order of properties is that of the schema: `late` says that the `oneOf` comes after properties.
    """
    return _any([_all(*((beside, option) if late else (option, beside)), *others) for option, others in apart]) or {
        "allOf": [False]
    }


class Negation:
    """What is left of all values where a schema holds, as alternatives."""

    def __init__(self, rewriter: Rewriter, keyword: str, path: str) -> None:
        # Who asks, for the message.
        self._rewriter, self._keyword, self._path = rewriter, keyword, path
        self._depth = 0
        self._found = 0

    def of(self, node: Any, path: str, base: str) -> list[Any]:
        """The alternatives to `node`; none where it always holds."""
        if isinstance(node, bool):
            return [] if node else [True]
        if not isinstance(node, dict):
            raise malformed(path.rsplit("/", 1)[-1], path, "is no schema: it must be an object, true or false")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused("schemas", f"more than {MAX_DEPTH} levels deep")
        base = self._rewriter.references.base(node, base)
        found: list[Any] = []
        if self._rewriter.old and "$ref" in node:
            node = {"$ref": node["$ref"]}
        for keyword, value in node.items():
            found += self._keyword_of(keyword, value, node, path, base)
        self._found += len(found)
        if self._found > MAX_ALTERNATIVES:
            raise self._refused("schemas", f"with more than {MAX_ALTERNATIVES} alternatives")
        self._depth -= 1
        return [True] if True in found else found

    def _refused(self, keyword: str, why: str = "") -> RequestError:
        return refused(self._keyword, self._path, f"a grammar cannot say the opposite of {keyword!r} {why}".rstrip())

    def _keyword_of(self, keyword: str, value: Any, node: dict[str, Any], path: str, base: str) -> list[Any]:
        if keyword == "$ref":
            target, place, target_base = self._rewriter.references.resolve(value, base, path)
            return self.of(target, place, target_base)
        if keyword == "not":
            return [self._rewriter.schema(value, step(path, "not"), self._depth, base)]
        if keyword in ("allOf", "anyOf"):
            return self._combined(keyword, value, path, base)
        if keyword == "type":
            return self._type(value)
        if keyword in ("const", "enum"):
            return self._listed(value if keyword == "enum" else [value], path)
        if keyword in _OPPOSITES and not any(isinstance(node.get(bound), bool) for bound in _OPPOSITES):
            return [_bounded({_OPPOSITES[keyword]: value}, path)]
        if keyword in _COUNTS:
            return self._count(keyword, node, path)
        if keyword in ("required", "properties"):
            return self._properties(keyword, node, path, base)
        if keyword == "uniqueItems" and value is False:
            return []
        if keyword in _CONSTRAINTS or keyword in schema_values.KEYWORDS | schema_arrays.KEYWORDS:
            raise self._refused(keyword)
        if keyword in schema_objects.KEYWORDS and value is not True:
            raise self._refused(keyword)
        return []

    def _combined(self, keyword: str, value: Any, path: str, base: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise malformed(keyword, path, "must be a list of schemas")
        each = [self.of(schema, f"{path}/{keyword}/{index}", base) for index, schema in enumerate(value)]
        if keyword == "allOf":
            return [option for options in each for option in options]
        both = _all(*map(_any, each))
        return [] if both is False else [both]

    def _type(self, value: Any) -> list[Any]:
        names = value if isinstance(value, list) else [value]
        if "integer" in names and "number" not in names:
            raise self._refused("integer")
        left = [name for name in _TYPES if name not in names]
        return [{"type": left}] if left else []

    def _listed(self, values: Any, path: str) -> list[Any]:
        if not isinstance(values, list) or any(isinstance(value, (list, dict)) for value in values):
            raise self._refused("enum", "with arrays or objects in it")
        texts = [value for value in values if isinstance(value, str)]
        numbers = sorted({value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)})
        touched = {"string"} if texts else set()
        touched |= {"number"} if numbers else set()
        touched |= {"null"} if None in values else set()
        touched |= {"boolean"} if any(isinstance(value, bool) for value in values) else set()
        found: list[Any] = [{"type": [name for name in _TYPES if name not in touched]}]
        found += [{"const": flag} for flag in (False, True) if "boolean" in touched and not _has(values, flag)]
        if texts:
            try:
                found.append({"type": "string", "pattern": f"^(?:{none_of(texts)})$"})
            except (PatternError, RecursionError) as error:
                raise self._refused("enum", "with such texts in it") from error
        if numbers:
            ends: list[Any] = [None, *numbers, None]
            for low, high in zip(ends, ends[1:], strict=False):
                wanted = {"exclusiveMinimum": low, "exclusiveMaximum": high}
                found.append(_bounded({key: bound for key, bound in wanted.items() if bound is not None}, path))
        return found

    def _count(self, keyword: str, node: dict[str, Any], path: str) -> list[Any]:
        kind, opposite = _COUNTS[keyword]
        value = schema_values.count(node, keyword, path, schema_arrays.MAX_ITEMS) or 0
        if kind == "object" and value != (1 if keyword == "minProperties" else 0):
            raise self._refused(keyword)
        if keyword.startswith("min"):
            return [{"type": kind, opposite: value - 1}] if value else []
        return [{"type": kind, opposite: value + 1}]

    def _properties(self, keyword: str, node: dict[str, Any], path: str, base: str) -> list[Any]:
        self._rewriter.plain_keys = True
        if keyword == "required":
            names = schema_objects.names_of(node["required"], "required", path)
            return [{"type": "object", "properties": {name: False}} for name in names]
        properties = node["properties"]
        if not isinstance(properties, dict):
            raise malformed("properties", path, "must be an object of schemas")
        return [
            {"type": "object", "properties": {name: option}, "required": [name]}
            for name, schema in properties.items()
            for option in self.of(schema, step(step(path, "properties"), name), base)
        ]


def _bounded(wanted: dict[str, Any], path: str) -> Any:
    bounds: dict[str, Any] = {}
    schema_values.bounds(wanted, path, bounds)
    shorter = schema_values.spellings(bounds)
    return _all({"type": "number", **bounds}, *shorter)


def _has(values: list[Any], flag: bool) -> bool:
    return any(value is flag for value in values)


def _any(options: list[Any]) -> Any:
    options = [option for option in options if option is not False]
    if True in [option for option in options if isinstance(option, bool)]:
        return True
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


def _all(*schemas: Any) -> Any:
    wanted = [schema for schema in schemas if schema is not True]
    if any(schema is False for schema in wanted):
        return False
    return True if not wanted else wanted[0] if len(wanted) == 1 else {"allOf": wanted}
