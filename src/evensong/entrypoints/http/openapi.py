"""The OpenAPI description: full schemas of what routes take and give, though bodies are read and written by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from evensong.entrypoints.http.forms_described import Error

JSON = "application/json"
_DEFINITIONS = "x-definitions"
_REFERENCE = "#/components/schemas/{model}"
_BEARER = {"bearer": {"type": "http", "scheme": "bearer"}}
_DESCRIPTION = (
    "OpenAI's API, and vLLM's routes beside it. Errors have one form: {error: {message, type, param, code}}. The "
    "header X-Request-Id goes in and out."
)

Route = dict[str, Any]


def object_of(**kinds: str) -> dict[str, Any]:
    """The schema of an object with these fields, by JSON type."""
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": list(kinds),
    }


def described_body(
    form: type[BaseModel],
    answer: type[BaseModel] | dict[str, Any],
    *,
    stream: bool = False,
    error: type[BaseModel] = Error,
) -> Route:
    """How a route that reads `form` is declared: arguments for FastAPI."""
    schema, definitions = _referenced(form)
    body = {"required": True, "content": {JSON: {"schema": schema}}}
    return _route({"requestBody": body}, definitions, answer, stream=stream, error=error)


def described_query(form: type[BaseModel], answer: type[BaseModel] | dict[str, Any], *, stream: bool = False) -> Route:
    """How a route whose query holds the fields of `form` is declared."""
    schema = form.model_json_schema(ref_template=_REFERENCE)
    required = schema.get("required", ())
    parameters = []
    for name, field in schema.get("properties", {}).items():
        # "Nothing" is said by leaving the parameter out.
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
        shown = {key: value for key, value in field.items() if key not in ("anyOf", "title", "default")} | kinds[0]
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": shown})
    return _route({"parameters": parameters}, schema.get("$defs", {}), answer, stream=stream)


def described(answer: type[BaseModel] | dict[str, Any], *, kind: str = JSON) -> Route:
    """How a route without arguments is declared."""
    return _route({}, {}, answer, kind=kind)


def describe_app(app: FastAPI, *, with_keys: bool) -> None:
    """Makes /openapi.json: FastAPI's own, and the definitions that its routes refer to."""

    def build() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
            app.openapi_schema = _completed(document, with_keys=with_keys)
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]  # the way that FastAPI's manual gives


def _completed(document: dict[str, Any], *, with_keys: bool) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            schemas |= operation.pop(_DEFINITIONS, {})
            # Declared by FastAPI for every parameter in a path; a text is never refused.
            operation["responses"].pop("422", None)
            if with_keys and not path.startswith("/health"):
                operation["security"] = [{"bearer": []}]
    document["components"] = {"schemas": dict(sorted(schemas.items()))}
    if with_keys:
        document["components"]["securitySchemes"] = _BEARER
    return document


def _route(
    extra: dict[str, Any],
    definitions: dict[str, Any],
    answer: type[BaseModel] | dict[str, Any],
    *,
    kind: str = JSON,
    stream: bool = False,
    error: type[BaseModel] = Error,
) -> Route:
    refused, errors = _referenced(error)
    schema, more = (answer, {}) if isinstance(answer, dict) else _referenced(answer)
    content: dict[str, Any] = {kind: {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failed = {"description": "The error.", "content": {JSON: {"schema": refused}}}
    return {
        "response_model": None,
        "responses": {200: {"description": "The answer.", "content": content}, "4XX": failed, "5XX": failed},
        "openapi_extra": {**extra, _DEFINITIONS: {**definitions, **errors, **more}},
    }


def _referenced(model: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A reference to a model's schema, and the definitions that make it good."""
    schema = model.model_json_schema(ref_template=_REFERENCE)
    definitions = schema.pop("$defs", {})
    return {"$ref": _REFERENCE.format(model=model.__name__)}, {**definitions, model.__name__: schema}
