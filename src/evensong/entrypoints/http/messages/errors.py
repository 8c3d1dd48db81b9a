"""Errors of /v1/messages have Anthropic's form, whoever says no: the keys, the router, a route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evensong.entrypoints.http.middleware import route_path, under_messages

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(status: int, error: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """The error object, of one in OpenAI's form."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["message"]}, "request_id": request_id}


class MessageErrors:
    """Rewrites error bodies of these routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not under_messages(route_path(scope)):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def rewritten(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                body = _rewritten(start["status"], body, scope.get("state", {}).get("request_id"))
                MutableHeaders(scope=start)["Content-Length"] = str(len(body))
                await send(start)
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, rewritten)


def _rewritten(status: int, body: bytes, request_id: str | None) -> bytes:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body
    return json.dumps(message_error(status, error, request_id)).encode()
