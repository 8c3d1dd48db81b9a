"""Where `$ref` leads: JSON pointers, anchors and embedded resources of one schema. Nothing is ever fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from evensong.scheduler.grammar.schema.errors import malformed, refused, step

# Keywords whose value is one schema, a list of schemas, or schemas by name.
ONE = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
]
MANY = ["allOf", "anyOf", "items", "oneOf", "prefixItems"]
NAMED = ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
_BASE = "schema:"  # what a schema without `$id` is called


def subschemas(node: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schemas directly inside `node`, each with its path from there."""
    found = [(f"/{key}", node[key]) for key in ONE if isinstance(node.get(key), dict)]
    for key in MANY:
        if isinstance(node.get(key), list):
            found += [(f"/{key}/{index}", each) for index, each in enumerate(node[key])]
    for key in NAMED:
        if isinstance(node.get(key), dict):
            found += [(step(f"/{key}", name), each) for name, each in node[key].items()]
    return found


class References:
    """All places of one document to which a `$ref` can lead."""

    def __init__(self, root: Any, *, old: bool) -> None:
        # `old`: drafts up to 7, where `$id: "#name"` was the anchor, and nothing beside a `$ref` counts.
        self.old = old
        self._resources: dict[str, tuple[Any, str]] = {}
        self._anchors: dict[tuple[str, str], tuple[Any, str]] = {}
        self._bases: dict[int, str] = {}
        self._index(root)

    def base(self, node: dict[str, Any], default: str) -> str:
        """The URI against which references inside of `node` are resolved."""
        return self._bases.get(id(node), default)

    def resolve(self, reference: object, base: str, path: str) -> tuple[Any, str, str]:
        """The schema that `reference` means, its path and its base URI. Raises RequestError."""
        if not isinstance(reference, str):
            raise malformed("$ref", path, "must be text")
        try:
            uri, fragment = urldefrag(urljoin(base, reference) if not reference.startswith("#") else base + reference)
        except ValueError as error:
            raise malformed("$ref", path, "is no URI") from error
        resource = self._resources.get(uri)
        if resource is None:
            raise refused("$ref", path, f"{reference!r:.100} is not in the schema, and nothing is fetched")
        node, place = resource
        if fragment and not fragment.startswith("/"):
            anchored = self._anchors.get((uri, unquote(fragment)))
            if anchored is None:
                raise refused("$ref", path, f"{reference!r:.100} is not in the schema")
            return *anchored, uri
        for part in unquote(fragment).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isascii() and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise refused("$ref", path, f"{reference!r:.100} is not in the schema")
            place = step(place, part)
            if isinstance(node, dict):
                uri = self.base(node, uri)
        return node, place, uri

    def _index(self, root: Any) -> None:
        self._resources[_BASE] = (root, "#")
        todo = [(root, "#", _BASE)]
        while todo:
            node, path, base = todo.pop()
            if not isinstance(node, dict):
                continue
            name = node.get("$id", node.get("id") if self.old else None)
            if isinstance(name, str) and not (self.old and "$ref" in node):
                if name.startswith("#"):
                    self._anchors[base, name[1:]] = (node, path)
                else:
                    try:
                        base = urldefrag(urljoin("" if base == _BASE else base, name))[0]
                    except ValueError as error:
                        raise malformed("$id", path, "is no URI") from error
                    self._resources.setdefault(base, (node, path))
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    self._anchors[base, node[key]] = (node, path)
            self._bases[id(node)] = base
            todo += [(each, path + where, base) for where, each in reversed(subschemas(node))]

    @property
    def root_base(self) -> str:
        """The base URI of the root."""
        return self._bases.get(id(self._resources[_BASE][0]), _BASE)
