"""Recursion that comes to nothing: references in a circle, and values that could never end."""

from __future__ import annotations

from typing import Any

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import PARAM
from evensong.scheduler.grammar.schema.errors import refused, too_large
from evensong.scheduler.grammar.schema.refs import subschemas

# Of all definitions together: the backend calls itself for each level, and past 1,600 its stack was seen to end.
MAX_LEVELS = 600


def _in_place(node: Any) -> list[str]:
    """The definitions that `node` stands for without anything of the value being read."""
    if not isinstance(node, dict):
        return []
    found = [node["$ref"].removeprefix("#/$defs/")] if "$ref" in node else []
    for keyword in ("allOf", "anyOf", "oneOf"):
        for each in node.get(keyword, ()):
            found += _in_place(each)
    return found


def check_progress(definitions: dict[str, Any], root: Any) -> None:
    """Refuses a `$ref` that leads back to itself before anything of the value is read, and one that never ends."""
    levels = sum(map(_levels, definitions.values()))
    if levels > MAX_LEVELS:
        raise too_large(f"its definitions have {levels} levels together, at most {MAX_LEVELS} are allowed")
    edges = {name: _in_place(node) for name, node in definitions.items()}
    done: set[str] = set()
    for start in [*_in_place(root), *edges]:
        stack = [(start, iter(edges[start]))]
        active = {start}
        while stack:
            name, following = stack[-1]
            target = next(following, None)
            if target is None:
                active.discard(name)
                done.add(name)
                stack.pop()
            elif target in active:
                raise refused("$ref", "#", "it leads back to itself without reading anything of the value")
            elif target not in done:
                active.add(target)
                stack.append((target, iter(edges[target])))
    _check_end(definitions, root)


def _levels(node: Any) -> int:
    """How deep schemas are nested in `node`, itself counted."""
    deepest, todo = 1, [(node, 1)]
    while todo:
        each, level = todo.pop()
        deepest = max(deepest, level)
        if isinstance(each, dict):
            todo += [(inner, level + 1) for _, inner in subschemas(each)]
    return deepest


def _check_end(definitions: dict[str, Any], root: Any) -> None:
    """Refuses schemas all of whose values would be endless: an object that must hold one of its own kind."""
    finite: set[str] = set()
    before = -1
    while len(finite) != before:
        before = len(finite)
        finite |= {name for name, node in definitions.items() if name not in finite and _ends(node, finite)}
    if not _ends(root, finite):
        raise RequestError("no value satisfies the JSON schema: every one would be endless", param=PARAM)


def _ends(node: Any, finite: set[str]) -> bool:
    """Whether, as far as recursion goes, some value of `node` ends."""
    if not isinstance(node, dict):
        return True
    if "$ref" in node and node["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    if not all(_ends(each, finite) for each in node.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_ends(each, finite) for each in node[keyword]):
            return False
    if node.get("type") == "object":
        properties = node.get("properties", {})
        return all(_ends(properties.get(name, True), finite) for name in node.get("required", ()))
    if node.get("type") == "array":
        prefix = node.get("prefixItems", ())
        needed = node.get("minItems", 0)
        if not all(_ends(each, finite) for each in prefix[:needed]):
            return False
        return needed <= len(prefix) or _ends(node.get("items", True), finite)
    return True
