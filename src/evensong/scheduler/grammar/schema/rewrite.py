"""A JSON Schema checked, and written anew in the keywords that the backend enforces exactly.

What comes out means the same as what went in, except that what cannot be enforced is refused by name
(docs/structured-output.md has the table). References lead to `$defs` of their own; annotations and unknown keywords,
which constrain nothing, are left out; `format` is a pattern, and a pattern is spelled in the backend's syntax.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from evensong.scheduler.grammar.schema import arrays as schema_arrays
from evensong.scheduler.grammar.schema import objects as schema_objects
from evensong.scheduler.grammar.schema import values as schema_values
from evensong.scheduler.grammar.schema.apart import Apart
from evensong.scheduler.grammar.schema.conditions import alternatives, conditions, split
from evensong.scheduler.grammar.schema.errors import malformed, refused, step, too_large
from evensong.scheduler.grammar.schema.names import only_matches
from evensong.scheduler.grammar.schema.progress import check_progress
from evensong.scheduler.grammar.schema.refs import References

MAX_DEPTH = 64
MAX_NODES = 10_000
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords that constrain, of any draft, and that nothing here can enforce.
_REFUSED = {
    "$dynamicRef": "it depends on who refers to a schema",
    "$recursiveRef": "it depends on who refers to a schema",
    "disallow": "it is of draft 3",
    "divisibleBy": "it is of draft 3",
    "extends": "it is of draft 3",
}
# Keywords in which schemas of one object meet.
_MERGING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies")
# Under these keys gather schemas that must hold as well, and options of a `oneOf` with what keeps them apart.
_MORE, _APART = "", "/"
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")


class Rewriter:
    """One schema's rewriting.

    `guarded`: keys that a schema does not name are kept apart from those that it names by a pattern, so that escapes
    (`"\\u0061"`) may be used elsewhere. Where two such schemas meet in an `allOf` the backend cannot do that;
    `plain_keys` then says that no escape may be written anywhere. `split`: options of a `oneOf` may overlap.
    """

    def __init__(self, root: Any, *, closed: bool, guarded: bool, split: bool = False) -> None:
        draft = root.get("$schema", "json-schema.org") if isinstance(root, dict) else None
        if isinstance(draft, str) and "json-schema.org" not in draft:
            raise refused("$schema", "#", "what keywords mean in that dialect is not known")
        self.old = isinstance(draft, str) and any(name in draft for name in _OLD_DRAFTS)
        self.closed = closed
        self.guarded = guarded
        self.split = split
        self.plain_keys = False
        self.places: dict[str, list[str]] = {}
        # All keys that are named, and patterns of keys with their places.
        self.keys: dict[str, None] = {}
        self.key_patterns: dict[str, str] = {}
        self.divisor: Decimal | None = None
        self._root = root
        self.references = References(root, old=self.old)
        self._apart = Apart(self.references)
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[Any, str, str, str]] = []
        self._nodes = 0

    def rewrite(self) -> Any:
        """The whole schema. Raises RequestError."""
        written = self.schema(self._root, "#", 0, self.references.root_base)
        definitions: dict[str, Any] = {}
        while self._waiting:
            node, path, base, name = self._waiting.pop()
            definitions[name] = self.schema(node, path, 0, base)
        check_progress(definitions, written)
        if any(keyword in self.places for keyword in _MERGING):
            if len(self.key_patterns) * len(self.keys) > schema_objects.MAX_COMPARED:
                raise too_large(f"{len(self.key_patterns)} patterns of keys meet {len(self.keys)} names")
            for key, path in self.key_patterns.items():
                if only_matches(key, list(self.keys)):
                    raise refused("patternProperties", path, "all of its keys are named elsewhere in the schema")
        if not definitions or not isinstance(written, dict):
            return written
        return {"$defs": definitions, **written}

    def schema(self, node: Any, path: str, depth: int, base: str) -> Any:
        """One schema, `depth` levels below the root or a definition."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise too_large(f"it has more than {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise too_large(f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise malformed(path.rsplit("/", 1)[-1], path, "is no schema: it must be an object, true or false")
        base = self.references.base(node, base)

        def inner(child: Any, *where: str | int) -> Any:
            place = path
            for key in where:
                place = step(place, key)
            return self.schema(child, place, depth + 1, base)

        written: dict[str, Any] = {}
        for keyword, why in _REFUSED.items():
            if keyword in node:
                raise refused(keyword, path, why)
        if "$ref" in node:
            written["$ref"] = self._reference(node["$ref"], path, base)
            if self.old:
                return written
        self._applicators(node, path, base, inner, written)
        more = written.pop(_MORE, [])
        for apart, late in written.pop(_APART, []):
            written = alternatives(apart, written, late=late)
        # What was added comes after what the schema says itself: the order of properties is the schema's.
        return written if not more else {"allOf": [written, *more]} if written else {"allOf": more}

    def conjoin(self, written: dict[str, Any], *more: Any) -> None:
        """Adds schemas that must hold as well."""
        written[_MORE] = [*written.get(_MORE, []), *more]

    def note(self, keyword: str, path: str) -> None:
        """Remembers where a keyword stands that the backend may refuse."""
        self.places.setdefault(keyword, []).append(path)

    def _reference(self, reference: object, path: str, base: str) -> str:
        target, place, target_base = self.references.resolve(reference, base, path)
        self.note("$ref", path)
        key = str(id(target)) if isinstance(target, dict) else f"{target_base} {place}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"d{len(self._names)}"
            self._waiting.append((target, place, target_base, name))
        return f"#/$defs/{name}"

    def _applicators(
        self, node: dict[str, Any], path: str, base: str, inner: Callable[..., Any], written: dict[str, Any]
    ) -> None:
        """Keywords in the order in which they stand: it decides the order of an object's properties."""
        done = set()
        for keyword, value in node.items():
            if keyword == "type":
                written["type"] = _types(value, path)
            elif keyword in ("allOf", "anyOf", "oneOf"):
                self.note(keyword, path)
                self._combined(keyword, node, path, base, inner, written)
            elif keyword in schema_values.KEYWORDS and "values" not in done:
                done.add("values")
                schema_values.rewrite(self, node, path, written)
            elif keyword in schema_arrays.KEYWORDS and "array" not in done:
                done.add("array")
                schema_arrays.rewrite(self, node, path, inner, written)
            elif keyword in schema_objects.KEYWORDS and "object" not in done:
                done.add("object")
                schema_objects.rewrite(self, node, path, inner, written)
        conditions(self, node, path, base, inner, written)

    def _combined(
        self,
        keyword: str,
        node: dict[str, Any],
        path: str,
        base: str,
        inner: Callable[..., Any],
        written: dict[str, Any],
    ) -> None:
        value = node[keyword]
        if not isinstance(value, list) or not value:
            raise malformed(keyword, path, "must be a list of schemas")
        options = [inner(each, keyword, index) for index, each in enumerate(value)]
        if keyword == "oneOf" and self._apart.all(value, path, base):
            if "anyOf" in node:
                self.conjoin(written, {"anyOf": options})
            else:
                written["anyOf"] = options
        elif keyword == "oneOf" and self.split and len(options) > 1:
            apart = split(self, value, options, path, base)
            written[_APART] = [*written.get(_APART, []), (apart, "properties" in written)]
        else:
            written[keyword] = options


def _types(value: object, path: str) -> str | list[str]:
    given = value if isinstance(value, list) else [value]
    names = list(dict.fromkeys(name for name in given if isinstance(name, str) and name in _TYPES))
    if not given or any(name not in names for name in given):
        raise malformed("type", path, f"must be one of {', '.join(_TYPES)}, or a list of them")
    if "number" in names:
        names = [name for name in names if name != "integer"]
    return names if len(names) > 1 else names[0]
