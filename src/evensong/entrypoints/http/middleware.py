"""For every request: its id, its key, and one form of error. Pure ASGI, so that streams pass through untouched."""

from __future__ import annotations

import hmac
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evensong.entrypoints.http.errors import error_response
from evensong.entrypoints.http.state import RETRY_AFTER_SECONDS, ServerState

REQUEST_ID = "X-Request-Id"
_SAFE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestIds:
    """Takes the caller's X-Request-Id, or makes one, and returns it with the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """401 without the key, where one is set; /health* is always open, /metrics when told so."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._state.settings_missing and not _is_health(scope["path"]):
            response = error_response(503, "starting", code="not_ready", retry_after=RETRY_AFTER_SECONDS)
            await response(scope, receive, send)
            return
        if scope["type"] == "http" and not self._allowed(scope):
            response = error_response(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        config = self._state.server_config
        path: str = scope["path"]
        if config.api_key is None or _is_health(path) or (path == "/metrics" and config.metrics_no_auth):
            return True
        scheme, _, key = Headers(scope=scope).get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            key.strip().encode("latin-1"), config.api_key.encode()
        )


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")
