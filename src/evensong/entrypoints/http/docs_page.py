"""The page at /docs: the routes and their fields as plain HTML, with nothing from anywhere else."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from starlette.responses import HTMLResponse, Response

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h2{font-size:1rem;margin:2rem 0 .2rem}code,h2{font-family:ui-monospace,monospace}table{border-collapse:collapse}
td,th{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0;border-bottom:1px solid #8884}
summary{cursor:pointer}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"""
# Whatever a model's name or a description holds, a browser runs none of it.
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def docs_page(document: dict[str, Any]) -> Response:
    """The page of an OpenAPI document."""
    return HTMLResponse("".join(_page(document)), headers=_HEADERS)


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"<h1>{title}</h1><p>{html.escape(info.get('description', ''))}</p>"
    yield '<p>For programs: <a href="openapi.json">openapi.json</a></p>'
    schemas = document.get("components", {}).get("schemas", {})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2>{method.upper()} {html.escape(path)}</h2>"
            yield f"<p>{html.escape(operation.get('description') or operation.get('summary', ''))}</p>"
            yield from _operation(operation, schemas)


def _operation(operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    parameters = {p["name"]: p["schema"] for p in operation.get("parameters", ())}
    yield from _table("parameters", {"properties": parameters}, schemas)
    yield from _table("body", _json_schema(operation.get("requestBody", {})), schemas)
    yield from _table("answer", _json_schema(operation["responses"].get("200", {})), schemas)


def _json_schema(holder: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = holder.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _table(title: str, schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    schema = schemas.get(_name_of(schema), schema)
    fields = schema.get("properties", {})
    if not fields:
        return
    yield f"<details><summary>{title}</summary><table>"
    required = schema.get("required", ())
    for name, field in fields.items():
        default = f"default {field['default']!r}" if field.get("default") is not None else ""
        note = "required" if name in required and title != "answer" else default
        cells = (f"<code>{html.escape(name)}</code>", html.escape(_kind(field)), html.escape(note))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table></details>"


def _kind(field: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "$ref" in field:
        return _name_of(field)
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(str(value) for value in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    return f"list of {_kind(field['items'])}" if kind == "array" and "items" in field else kind


def _name_of(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]
