"""Keywords about single values: `const`, `enum`, texts and numbers."""

from __future__ import annotations

import math
from decimal import ROUND_DOWN, Decimal
from typing import TYPE_CHECKING, Any

from evensong.protocol.text import has_lone_surrogate
from evensong.scheduler.grammar.schema.errors import malformed, refused, too_large
from evensong.scheduler.grammar.schema.formats import (
    FORMAT_LENGTHS,
    FREE_FORMATS,
    NUMBER_FORMATS,
    TEXT_FORMATS,
)
from evensong.scheduler.grammar.schema.pattern import PatternError, translate_pattern

if TYPE_CHECKING:
    from evensong.scheduler.grammar.schema.rewrite import Rewriter

KEYWORDS = frozenset(
    [
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maximum",
        "maxLength",
        "minimum",
        "minLength",
        "multipleOf",
        "pattern",
    ]
)
MAX_LENGTH = 1_000_000
MAX_VALUES = 4096
MAX_VALUE_DEPTH = 32
# Whole numbers up to here are exact in the backend, which reckons in double precision.
MAX_WHOLE = 2**53
MIN_MAGNITUDE = 1e-15
# Of a divisor's digits, without zeros at the end: a state of the automaton for each remainder.
MAX_DIVISOR = 2048
MAX_TEXT = 8192  # characters of one value
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def rewrite(rewriter: Rewriter, node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
    """Writes the keywords of `node` that this module knows."""
    _constants(node, path, written)
    _text(rewriter, node, path, written)
    found: dict[str, Any] = {}
    bounds(node, path, found)
    if "multipleOf" in node:
        found["multipleOf"] = _divisor(rewriter, node["multipleOf"], path)
    shorter = spellings(found)
    written.update(found)
    if shorter:
        rewriter.conjoin(written, *shorter)
    if "format" in node:
        _format(rewriter, node["format"], path, written)


def count(node: dict[str, Any], keyword: str, path: str, limit: int) -> int | None:
    """A keyword that counts something, at most `limit`."""
    value = node.get(keyword)
    if keyword not in node:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise malformed(keyword, path, "must be a whole number, at least 0")
    if value > limit:
        raise refused(keyword, path, f"{value} is more than {limit}")
    return value


def _constants(node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
    if "const" in node:
        written["const"] = _constant(node["const"], "const", path, 0)
    if "enum" not in node:
        return
    values = node["enum"]
    if not isinstance(values, list) or not values:
        raise malformed("enum", path, "must be a list of values")
    if len(values) > MAX_VALUES:
        raise too_large(f"'enum' at {path} has {len(values)} values, at most {MAX_VALUES} are allowed")
    written["enum"] = [_constant(value, "enum", path, 0) for value in values]


def _constant(value: Any, keyword: str, path: str, depth: int) -> Any:
    """A value that the backend can write exactly."""
    if depth > MAX_VALUE_DEPTH:
        raise too_large(f"a value of {keyword!r} at {path} is nested more than {MAX_VALUE_DEPTH} levels deep")
    if isinstance(value, list):
        return [_constant(each, keyword, path, depth + 1) for each in value]
    if isinstance(value, dict):
        for key in value:
            _checked_text(key, keyword, path)
        return {key: _constant(each, keyword, path, depth + 1) for key, each in value.items()}
    if isinstance(value, str):
        return _checked_text(value, keyword, path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value, keyword, path)
    return value


def _checked_text(text: str, keyword: str, path: str) -> str:
    if has_lone_surrogate(text):
        raise malformed(keyword, path, "holds a lone surrogate, which no text can contain")
    if len(text) > MAX_TEXT:
        raise too_large(f"a text of {keyword!r} at {path} has {len(text)} characters, at most {MAX_TEXT} are allowed")
    return text


def _number(value: Any, keyword: str, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and value != value):
        raise malformed(keyword, path, "must be a number")
    if abs(value) > MAX_WHOLE:
        raise refused(keyword, path, f"{value!r:.40} is beyond what is enforced exactly (2^53)")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if 0 < abs(value) < MIN_MAGNITUDE:
        raise refused(keyword, path, f"{value!r} is smaller than what is enforced exactly (1e-15)")
    return value


def _text(rewriter: Rewriter, node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
    for keyword in ("minLength", "maxLength"):
        length = count(node, keyword, path, MAX_LENGTH)
        if length is not None:
            rewriter.note(keyword, path)
            written[keyword] = length
    if "pattern" in node:
        rewriter.note("pattern", path)
        written["pattern"] = pattern(node["pattern"], "pattern", path)


def pattern(value: object, keyword: str, path: str) -> str:
    """A pattern in the backend's syntax. Raises RequestError."""
    if not isinstance(value, str):
        raise malformed(keyword, path, "must be a regular expression")
    try:
        return translate_pattern(value)
    except PatternError as error:
        raise refused(keyword, path, str(error)) from error


def bounds(node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
    """Writes the bounds of numbers that `node` has."""
    found: dict[str, int | float] = {}
    for keyword in _BOUNDS:
        if keyword not in node:
            continue
        value = node[keyword]
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            # Draft 4: it says how `minimum` or `maximum` is meant.
            inclusive = keyword.removeprefix("exclusive").lower()
            if value and inclusive in found:
                found[keyword] = found.pop(inclusive)
            continue
        found[keyword] = _number(value, keyword, path)
    low = found.get("exclusiveMinimum")
    if isinstance(low, int) and low >= 0 and node.get("type") != "integer":
        # Where the maximum is less than 1 above, the backend would let the bound itself through.
        if low > 10**12:
            raise refused("exclusiveMinimum", path, f"{low} is too large where numbers need not be whole")
        del found["exclusiveMinimum"]
        least = MIN_MAGNITUDE if low == 0 else low + (1e-9 if low < 10**6 else 1e-3)
        found["minimum"] = max(found.get("minimum", low), least)
    written.update(found)


def spellings(wanted: dict[str, Any]) -> list[Any]:
    """What adds the numbers that the backend forgets, those with fewer decimals than a bound or a divisor.

    Of 2.25 and less it would take 2.20 and not 2.2. Such a keyword moves from `wanted` into alternatives.
    """
    found = []
    for keyword in ("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "multipleOf"):
        if not isinstance(wanted.get(keyword), float):
            continue
        value = Decimal(repr(wanted[keyword]))
        if (value > 0) == keyword.lower().endswith("minimum"):
            continue
        places = -int(value.as_tuple().exponent)
        name = keyword if keyword == "multipleOf" else keyword.lower().removeprefix("exclusive")
        more: dict[Decimal, None] = {}
        for place in range(1, places):
            unit = Decimal(1).scaleb(-place)
            if name == "multipleOf":
                more[_common_multiple(value, unit)] = None
            else:
                more[value.quantize(unit, rounding=ROUND_DOWN)] = None
        if more:
            options = [{"type": "number", name: float(each)} for each in more if each != value]
            found.append({"anyOf": [{keyword: wanted.pop(keyword)}, *options]})
    return found


def _common_multiple(first: Decimal, second: Decimal) -> Decimal:
    scale = Decimal(10) ** max(-int(first.as_tuple().exponent), -int(second.as_tuple().exponent))
    return math.lcm(int(first * scale), int(second * scale)) / scale


def _divisor(rewriter: Rewriter, value: object, path: str) -> int | float:
    divisor = _number(value, "multipleOf", path)
    if divisor <= 0:
        raise malformed("multipleOf", path, "must be greater than 0")
    if divisor < 1e-9:
        raise refused("multipleOf", path, f"{divisor!r} is too small")
    rewriter.note("multipleOf", path)
    # In an `allOf` any of them may meet: their common multiple is what the backend reckons with.
    rewriter.divisor = _common_multiple(rewriter.divisor or Decimal(repr(divisor)), Decimal(repr(divisor)))
    if int("".join(map(str, rewriter.divisor.as_tuple().digits)).rstrip("0")) > MAX_DIVISOR:
        raise refused("multipleOf", path, "the divisors of the schema have too large a common multiple")
    return divisor


def _format(rewriter: Rewriter, name: object, path: str, written: dict[str, Any]) -> None:
    if not isinstance(name, str):
        raise malformed("format", path, "must be text")
    if name in TEXT_FORMATS:
        rewriter.note("format", path)
        wanted: dict[str, Any] = {"pattern": f"^(?:{TEXT_FORMATS[name]})$"}
        if name in FORMAT_LENGTHS:
            wanted["maxLength"] = FORMAT_LENGTHS[name]
    elif name in NUMBER_FORMATS:
        low, high = NUMBER_FORMATS[name]
        wanted = {"minimum": low, "maximum": high}
    elif name in FREE_FORMATS:
        return
    else:
        raise refused("format", path, f"the format {name!r:.60} is none of those that are enforced")
    if wanted.keys() & written.keys():
        rewriter.conjoin(written, wanted)
    else:
        written.update(wanted)
