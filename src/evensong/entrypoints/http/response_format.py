"""response_format (OpenAI's) and structured_outputs (vLLM's) to what the engine knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import KINDS, StructuredOutputsParams, structured_outputs

_PARAM = "response_format"
_NAME_CHARACTERS = 64


def wanted_structure(
    response_format: Mapping[str, Any] | None, structure: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """What the output must look like; None where anything may come. Raises RequestError naming the field."""
    formatted = None if response_format is None else _read_format(response_format)
    if formatted is None:
        return structured_outputs(structure)
    if structure is None:
        return StructuredOutputsParams(**formatted)
    options = dict(structure)
    if not options.keys().isdisjoint(KINDS):
        raise RequestError("response_format and structured_outputs exclude each other", param="structured_outputs")
    # What remains says how the format of the other field is to be enforced.
    return structured_outputs({**options, **formatted})


def _read_format(value: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": _schema_of(value.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": dict(value)}
    raise RequestError(
        f"response_format.type must be text, json_object, json_schema or structural_tag, got {kind!r:.60}", param=_PARAM
    )


def _schema_of(value: object) -> Any:
    """The schema itself. `strict` makes no difference: what is accepted is enforced."""
    if not isinstance(value, Mapping) or "schema" not in value:
        raise RequestError("response_format.json_schema must be an object that holds a schema", param=_PARAM)
    name = value.get("name", "schema")
    if not isinstance(name, str) or not name or len(name) > _NAME_CHARACTERS:
        raise RequestError(f"response_format.json_schema.name must be 1 to {_NAME_CHARACTERS} characters", param=_PARAM)
    if not isinstance(value["schema"], (dict, bool)):
        raise RequestError("response_format.json_schema.schema must be an object", param=_PARAM)
    return value["schema"]
