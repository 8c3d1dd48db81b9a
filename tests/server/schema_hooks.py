"""For schemathesis: generated requests name the model that is served, else nearly all of them would end with a 404."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """A text stays a text, and messages stay objects, so what was right or wrong about the body still is.

    Some keep their own.
    """
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and len(body["model"]) % 8 != 7:
        body = {**body, "model": "demo"}
    messages = body.get("messages")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages) and len(str(messages)) % 4:
        body = {**body, "messages": [{"role": "user", "content": "Hello!"}]}
    return body


@schemathesis.hook
def map_path_parameters(context: schemathesis.HookContext, path_parameters: Any) -> Any:
    """The same for /v1/models/{name}."""
    if isinstance(path_parameters, dict) and len(str(path_parameters.get("name", ""))) % 2:
        return {**path_parameters, "name": "demo"}
    return path_parameters
