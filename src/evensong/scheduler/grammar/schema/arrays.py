"""Keywords about arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evensong.scheduler.grammar.schema.errors import malformed, refused
from evensong.scheduler.grammar.schema.values import count

if TYPE_CHECKING:
    from evensong.scheduler.grammar.schema.rewrite import Rewriter

KEYWORDS = frozenset(
    [
        "additionalItems",
        "contains",
        "items",
        "maxContains",
        "maxItems",
        "minContains",
        "minItems",
        "prefixItems",
        "unevaluatedItems",
        "uniqueItems",
    ]
)
MAX_ITEMS = 10_000
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "contains")


def rewrite(
    rewriter: Rewriter, node: dict[str, Any], path: str, inner: Callable[..., Any], written: dict[str, Any]
) -> None:
    """Writes the keywords of `node` that this module knows."""
    low = count(node, "minItems", path, MAX_ITEMS)
    high = count(node, "maxItems", path, MAX_ITEMS)
    _items(node, path, inner, written)
    if "unevaluatedItems" in node and node["unevaluatedItems"] is not True and "items" not in written:
        if any(keyword in node for keyword in _IN_PLACE):
            raise refused("unevaluatedItems", path, "beside it stand keywords that evaluate items in place")
        written["items"] = inner(node["unevaluatedItems"], "unevaluatedItems")
    low, high = _contains(node, path, low, high)
    unique = node.get("uniqueItems", False)
    if not isinstance(unique, bool):
        raise malformed("uniqueItems", path, "must be true or false")
    if unique and (high is None or high > 1):
        raise refused("uniqueItems", path, "a grammar does not remember the items before")
    if low:
        written["minItems"] = low
    if high is not None:
        written["maxItems"] = high
    if low or high is not None:
        rewriter.note("minItems" if low else "maxItems", path)


def _items(node: dict[str, Any], path: str, inner: Callable[..., Any], written: dict[str, Any]) -> None:
    prefix, rest, name = node.get("prefixItems"), node.get("items"), "items"
    if isinstance(rest, list) and prefix is None:
        # Drafts before 2020-12: a list of schemas, and `additionalItems` for what follows.
        prefix, rest, name = rest, node.get("additionalItems"), "additionalItems"
    if prefix is not None:
        key = "prefixItems" if "prefixItems" in node else "items"
        if not isinstance(prefix, list):
            raise malformed(key, path, "must be a list of schemas")
        if prefix:
            written["prefixItems"] = [inner(each, key, index) for index, each in enumerate(prefix)]
    if name in node:
        written["items"] = inner(rest, name)


def _contains(node: dict[str, Any], path: str, low: int | None, high: int | None) -> tuple[int | None, int | None]:
    """The bounds on the number of items, with what `contains` asks for where any item will do."""
    if "contains" not in node:
        return low, high
    least = count(node, "minContains", path, MAX_ITEMS)
    most = count(node, "maxContains", path, MAX_ITEMS)
    if node["contains"] is True or node["contains"] == {}:
        low = max(low or 0, 1 if least is None else least)
        high = high if most is None else most if high is None else min(high, most)
    elif least != 0 or most is not None:
        raise refused("contains", path, "a grammar does not count the items that match")
    return low, high
