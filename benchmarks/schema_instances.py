"""Instances of JSON schemas as a constrained model writes them: keys in the schema's order, whole numbers whole."""

from __future__ import annotations

import json
from typing import Any

_MAX_DEPTH = 24


def write(schema: Any, instance: Any) -> str:
    """`instance` with json.dumps' defaults, its keys in the order of `schema`."""
    return json.dumps(ordered(schema, instance))


def ordered(schema: Any, instance: Any) -> Any:
    """`instance` with the keys of its objects in the order in which `schema` names them; others come last."""
    return _ordered([schema], schema, instance, 0)


def _ordered(schemas: list[Any], root: Any, value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [
            _ordered(_under(schemas, root, value, index), root, each, depth + 1) if depth < _MAX_DEPTH else each
            for index, each in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    names: dict[str, None] = {}
    required: dict[str, None] = {}
    for node in _flat(schemas, root, value):
        properties = node.get("properties")
        names.update(dict.fromkeys(properties if isinstance(properties, dict) else ()))
        wanted = node.get("required")
        required.update(dict.fromkeys(wanted if isinstance(wanted, list) else ()))
        for each in [node.get("const"), *(node["enum"] if isinstance(node.get("enum"), list) else ())]:
            if isinstance(each, dict) and each == value:
                names.update(dict.fromkeys(each))
    keys = [key for key in [*names, *(key for key in required if key not in names)] if key in value]
    keys += [key for key in value if key not in keys]
    if depth >= _MAX_DEPTH:
        return {key: value[key] for key in keys}
    return {key: _ordered(_under(schemas, root, value, key), root, value[key], depth + 1) for key in keys}


def _flat(schemas: list[Any], root: Any, value: Any) -> list[dict[str, Any]]:
    """The schemas that hold for one value, in the order in which they stand."""
    found: list[dict[str, Any]] = []
    seen: set[int] = set()

    def visit(node: Any, depth: int) -> None:
        if not isinstance(node, dict) or id(node) in seen or depth > _MAX_DEPTH:
            return
        seen.add(id(node))
        if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
            visit(_resolve(root, node["$ref"]), depth + 1)
        placed = False
        for keyword, inner in node.items():
            if keyword in ("allOf", "anyOf", "oneOf") and isinstance(inner, list):
                for each in inner if keyword == "allOf" else sorted(inner, key=missing):
                    visit(each, depth + 1)
            elif keyword in ("then", "else", "if"):
                visit(inner, depth + 1)
            elif keyword == "dependentSchemas" and isinstance(inner, dict):
                for each in inner.values():
                    visit(each, depth + 1)
            elif not placed:
                placed = True
                found.append(node)

    def missing(option: Any) -> int:
        """How much `value` lacks of what an option asks for: the option that holds names the order."""
        if isinstance(option, dict) and isinstance(option.get("$ref"), str):
            option = _resolve(root, option["$ref"])
        required = option.get("required") if isinstance(option, dict) else None
        return len([name for name in required if name not in value]) if isinstance(required, list) else 0

    for schema in schemas:
        visit(schema, 0)
    return found


def _resolve(root: Any, reference: str) -> Any:
    node = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _under(schemas: list[Any], root: Any, value: Any, key: str | int) -> list[Any]:
    found = []
    for node in _flat(schemas, root, value):
        if isinstance(key, str):
            for keyword in ("properties", "patternProperties"):
                group = node.get(keyword)
                if isinstance(group, dict):
                    found += [each for name, each in group.items() if keyword == "patternProperties" or name == key]
            found.append(node.get("additionalProperties"))
        else:
            prefix = node.get("prefixItems", node["items"] if isinstance(node.get("items"), list) else [])
            if isinstance(prefix, list) and key < len(prefix):
                found.append(prefix[key])
            found.append(node.get("items"))
    return found


def canonical(value: Any) -> Any:
    """`value` with whole numbers written whole: 1.0 as 1."""
    if isinstance(value, list):
        return [canonical(each) for each in value]
    if isinstance(value, dict):
        return {key: canonical(each) for key, each in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
