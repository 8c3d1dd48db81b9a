"""Whether two schemas are plainly apart: no value satisfies both. Then `oneOf` is `anyOf`."""

from __future__ import annotations

import json
from typing import Any

from evensong.protocol.errors import RequestError
from evensong.scheduler.grammar.schema.refs import References

MAX_DEPTH = 6
MAX_COMPARISONS = 4000
_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))


class Apart:
    """Comparisons within one document. What it cannot see to be apart is not."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._left = MAX_COMPARISONS

    def all(self, options: list[Any], path: str, base: str) -> bool:
        """Whether each of `options` is apart from each other one."""
        return all(
            self._pair((first, base), (second, base), path, 0)
            for index, first in enumerate(options)
            for second in options[index + 1 :]
        )

    def _pair(self, first: tuple[Any, str], second: tuple[Any, str], path: str, depth: int) -> bool:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            return False
        (one, one_base), (two, two_base) = first, second
        if one is False or two is False:
            return True
        if not isinstance(one, dict) or not isinstance(two, dict):
            return False
        if self._references.old:
            one, two = ({"$ref": node["$ref"]} if "$ref" in node else node for node in (one, two))
            first, second = (one, one_base), (two, two_base)
        if self._parts(first, second, path, depth) or self._parts(second, first, path, depth):
            return True
        types = _types(one) & _types(two)
        values, others = _values(one), _values(two)
        if not types or (values is not None and others is not None and not values & others):
            return True
        return types == {"object"} and self._objects(first, second, path, depth)

    def _parts(self, first: tuple[Any, str], second: tuple[Any, str], path: str, depth: int) -> bool:
        """Whether something that `first` asks for as well is apart from `second`."""
        node, base = first
        base = self._references.base(node, base)
        if "$ref" in node:
            try:
                target, _, target_base = self._references.resolve(node["$ref"], base, path)
            except RequestError:
                return False
            if self._pair((target, target_base), second, path, depth + 1):
                return True
        parts = node.get("allOf")
        if isinstance(parts, list) and any(self._pair((part, base), second, path, depth + 1) for part in parts):
            return True
        for keyword in ("anyOf", "oneOf"):
            options = node.get(keyword) or [True]
            if isinstance(options, list) and all(
                self._pair((option, base), second, path, depth + 1) for option in options
            ):
                return True
        return False

    def _objects(self, first: tuple[Any, str], second: tuple[Any, str], path: str, depth: int) -> bool:
        """Whether a property that both must have makes the difference."""
        for name in [*_required(first[0]), *_required(second[0])]:
            one, two = _property(first[0], name), _property(second[0], name)
            if self._pair((one, first[1]), (two, second[1]), path, depth + 1):
                return True
        return False


def _types(node: dict[str, Any]) -> frozenset[str]:
    given = node.get("type", list(_ALL))
    names = given if isinstance(given, list) else [given]
    types = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    values = node["enum"] if isinstance(node.get("enum"), list) else [node["const"]] if "const" in node else None
    if values is not None:
        types &= {_type(value) for value in values}
    return frozenset(types)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return kinds[type(value)]


def _values(node: dict[str, Any]) -> set[str] | None:
    """The values that a schema lists, where it does."""
    if "const" in node:
        return {_spelled(node["const"])}
    return {_spelled(value) for value in node["enum"]} if isinstance(node.get("enum"), list) else None


def _spelled(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Numbers inside of others may be spelled in two ways: such values are taken for equal.
    return type(value).__name__ if isinstance(value, (list, dict)) else json.dumps(value)


def _required(node: dict[str, Any]) -> list[str]:
    names = node.get("required", [])
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(node: dict[str, Any], name: str) -> Any:
    """What an object's schema asks of the property `name`; True where it is not plain."""
    properties = node.get("properties", {})
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return not (node.get("additionalProperties") is False and not node.get("patternProperties"))
