"""Keywords about objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evensong.protocol.text import has_lone_surrogate
from evensong.scheduler.grammar.schema.errors import malformed, refused, too_large
from evensong.scheduler.grammar.schema.names import Names, matching, only_matches
from evensong.scheduler.grammar.schema.pattern import none_of
from evensong.scheduler.grammar.schema.values import count, pattern

if TYPE_CHECKING:
    from evensong.scheduler.grammar.schema.rewrite import Rewriter

KEYWORDS = frozenset(
    [
        "additionalProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "propertyNames",
        "required",
        "unevaluatedProperties",
    ]
)
MAX_PROPERTIES = 2000
MAX_DEPENDENCIES = 4
MAX_PATTERNS = 64
MAX_COMPARED = 20_000  # of names with patterns of names
# Keys longer than this, all together, are kept apart without a pattern.
_MAX_GUARDED_CHARACTERS = 4000
_MAX_GUARDED_KEY = 100
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies")
Inner = Callable[..., Any]


def rewrite(rewriter: Rewriter, node: dict[str, Any], path: str, inner: Inner, written: dict[str, Any]) -> None:
    """Writes the keywords of `node` that this module knows."""
    properties = _schemas(node, "properties", path, inner)
    patterns = _schemas(node, "patternProperties", path, inner)
    required = _required(node, path)
    rest = _rest(rewriter, node, path, inner)
    if len(patterns) > MAX_PATTERNS:
        raise too_large(
            f"'patternProperties' at {path} has {len(patterns)} members, at most {MAX_PATTERNS} are allowed"
        )
    patterns = {pattern(key, "patternProperties", path): value for key, value in patterns.items()}
    if patterns:
        rewriter.note("patternProperties", path)
    if "propertyNames" in node:
        rest = _property_names(node["propertyNames"], path, properties, required, patterns, rest)
    _fold(rewriter, path, properties, patterns, required)
    _write(rewriter, properties, patterns, required, rest, written)
    _counts(rewriter, node, path, properties, required, closed=rest is False and not patterns, written=written)
    _dependencies(rewriter, node, path, inner, written)


def _schemas(node: dict[str, Any], keyword: str, path: str, inner: Inner) -> dict[str, Any]:
    value = node.get(keyword, {})
    if not isinstance(value, dict):
        raise malformed(keyword, path, "must be an object of schemas")
    if len(value) > MAX_PROPERTIES:
        raise too_large(f"{keyword!r} at {path} has {len(value)} members, at most {MAX_PROPERTIES} are allowed")
    for name in value:
        if has_lone_surrogate(name):
            raise malformed(keyword, path, "holds a lone surrogate, which no text can contain")
    return {name: inner(each, keyword, name) for name, each in value.items()}


def _required(node: dict[str, Any], path: str) -> list[str]:
    return names_of(node.get("required", []), "required", path)


def names_of(value: object, keyword: str, path: str) -> list[str]:
    """A list of property names, each once."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise malformed(keyword, path, "must be a list of property names")
    if any(map(has_lone_surrogate, value)):
        raise malformed(keyword, path, "holds a lone surrogate, which no text can contain")
    if len(value) > MAX_PROPERTIES:
        raise too_large(f"{keyword!r} at {path} has {len(value)} names, at most {MAX_PROPERTIES} are allowed")
    return list(dict.fromkeys(value))


def _rest(rewriter: Rewriter, node: dict[str, Any], path: str, inner: Inner) -> Any:
    """The schema of the properties that are neither named nor matched."""
    if "additionalProperties" in node:
        return inner(node["additionalProperties"], "additionalProperties")
    if "unevaluatedProperties" in node and node["unevaluatedProperties"] is not True:
        if any(keyword in node for keyword in _IN_PLACE):
            raise refused("unevaluatedProperties", path, "beside it stand keywords that evaluate properties in place")
        return inner(node["unevaluatedProperties"], "unevaluatedProperties")
    return not (rewriter.closed and "properties" in node)


def _property_names(
    wanted: Any, path: str, properties: dict[str, Any], required: list[str], patterns: dict[str, Any], rest: Any
) -> Any:
    """Lets only the names that `wanted` allows be used; what is left for others."""
    names = Names(wanted, path)
    named = list(dict.fromkeys([*properties, *required]))
    allowed = names.allowed(named)
    properties.update(dict.fromkeys(set(named).difference(allowed), False))
    if names.free or (rest is False and not patterns):
        return rest
    if patterns:
        raise refused("propertyNames", path, "beside it stands 'patternProperties'")
    if rest is not True and allowed:
        raise refused("propertyNames", path, "beside it stand 'properties' and 'additionalProperties'")
    if names.pattern is not None:
        patterns[names.pattern] = rest
    return False


def _fold(
    rewriter: Rewriter, path: str, properties: dict[str, Any], patterns: dict[str, Any], required: list[str]
) -> None:
    """Takes out patterns all of whose keys are named, where a grammar would begin a key and find no way to go on."""
    names = list(dict.fromkeys([*properties, *required]))
    if len(names) * len(patterns) > MAX_COMPARED:
        raise too_large(f"at {path} {len(patterns)} patterns meet {len(names)} names")
    for key, wanted in list(patterns.items()):
        if names and only_matches(key, names):
            for name in matching(key, names):
                own = properties.get(name, True)
                properties[name] = wanted if own is True else own if wanted is True else {"allOf": [own, wanted]}
            del patterns[key]
        elif wanted is not False:
            rewriter.key_patterns.setdefault(key, path)
    rewriter.keys.update(dict.fromkeys(names))


def _write(
    rewriter: Rewriter,
    properties: dict[str, Any],
    patterns: dict[str, Any],
    required: list[str],
    rest: Any,
    written: dict[str, Any],
) -> None:
    names = [*properties, *(name for name in required if name not in properties)]
    if rest is not False and (names or patterns):
        characters = sum(map(len, names))
        short = not any("\0" in name for name in names)
        short = short and characters <= _MAX_GUARDED_CHARACTERS and max(map(len, names), default=0) <= _MAX_GUARDED_KEY
        if rewriter.guarded and short and not patterns:
            properties = {**properties, **{name: rest for name in names if name not in properties}}
            patterns, rest = {f"^(?:{none_of(names)})$": rest}, False
        else:
            rewriter.plain_keys = True
    if properties:
        written["properties"] = properties
    if patterns:
        written["patternProperties"] = patterns
    if rest is not True:
        written["additionalProperties"] = rest
    if required:
        written["required"] = required


def _counts(
    rewriter: Rewriter,
    node: dict[str, Any],
    path: str,
    properties: dict[str, Any],
    required: list[str],
    *,
    closed: bool,
    written: dict[str, Any],
) -> None:
    low = count(node, "minProperties", path, MAX_PROPERTIES)
    high = count(node, "maxProperties", path, MAX_PROPERTIES)
    if low is not None and low > len(required):
        if not closed and low > len(required) + 1:
            raise refused("minProperties", path, "a grammar does not remember the keys before, and one may come twice")
        rewriter.note("minProperties", path)
        written["minProperties"] = low
    if high is not None and not (closed and high >= len({*properties, *required})):
        rewriter.note("maxProperties", path)
        written["maxProperties"] = high


def _dependencies(rewriter: Rewriter, node: dict[str, Any], path: str, inner: Inner, written: dict[str, Any]) -> None:
    """Either the property is not there, or what it asks for holds."""
    found: list[Any] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = node.get(keyword, {})
        if not isinstance(value, dict):
            raise malformed(keyword, path, "must be an object")
        if len(value) > MAX_DEPENDENCIES:
            raise refused(keyword, path, f"more than {MAX_DEPENDENCIES} of them have too many combinations")
        for name, wanted in value.items():
            if isinstance(wanted, list) and keyword != "dependentSchemas":
                names = names_of(wanted, keyword, path)
                holds: Any = {"required": [name, *(each for each in names if each != name)]} if names else True
            else:
                if keyword == "dependentRequired":
                    raise malformed(keyword, path, "must be an object of lists of names")
                wish = inner(wanted, keyword, name)
                holds = wish if isinstance(wish, bool) else {"allOf": [{"required": [name]}, wish]}
            if holds is not True:
                rewriter.note(keyword, path)
                rewriter.plain_keys = True
                found.append({"anyOf": [{"properties": {name: False}}, *([] if holds is False else [holds])]})
    if found:
        rewriter.conjoin(written, *found)
