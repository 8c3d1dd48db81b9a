"""Which parsers a server uses: by its flags, or by what the model's chat template shows."""

from __future__ import annotations

import functools

from evensong.entrypoints.http.parsers.formats import TOOL_FORMATS, ToolFormat

_DEFAULT = "hermes"


def tool_format(name: str | None, template: str | None) -> ToolFormat:
    """The format that the flag names; where it names none, the one that the template shows."""
    detected = _detected(template or "")
    if name is None:
        return TOOL_FORMATS[detected]
    # Mistral has changed its way; which one a model knows stands in its template.
    return TOOL_FORMATS[detected if detected.startswith(name) else name]


@functools.lru_cache(maxsize=8)
def _detected(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral_named" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        return _DEFAULT
    return "llama3_json" if "<|python_tag|>" in template or '{"name": function name' in template else _DEFAULT
