"""For every request: its id, its key, and one form of error. Pure ASGI, so that streams pass through untouched."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evensong.config.sections import ServerConfig
from evensong.entrypoints.http.errors import error_response, exception_response
from evensong.observe.tracing import INCOMING, TRACE_HEADERS
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

REQUEST_ID = "X-Request-Id"
WARNING_HEADER = "X-Evensong-Warning"
_SAFE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestIds:
    """Takes the caller's X-Request-Id, or makes one, and returns it with the response. HEAD is GET without a body.

    `root_path` is the prefix under which a proxy shows this server, whether it leaves the prefix in the path or not.
    """

    def __init__(self, app: ASGIApp, root_path: str, log: bool, traces: bool) -> None:
        self._app = app
        self._traces = traces
        self._root_path = root_path
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        if self._traces:
            # Every request runs in a task, and so in a context, of its own.
            INCOMING.set({name: headers[name] for name in TRACE_HEADERS if name in headers})
        began, status, method = time.monotonic(), 0, scope["method"]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                status = message["status"]
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            inner = {**scope, "root_path": self._root_path, "method": "GET" if method == "HEAD" else method}
            await self._app(inner, receive, send_with_id)
        finally:
            if self._log:
                # Without the query, which a caller may have put a key into.
                took = 1000 * (time.monotonic() - began)
                client = scope["client"][0] if scope.get("client") else "-"
                logger.info("%s %s %s %d %.1f ms id=%s", client, method, scope["path"], status, took, request_id)


class Cors(CORSMiddleware):
    """Cross-origin calls of web pages; a refused preflight has this server's form of error."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser asks before it calls."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = error_response(response.status_code, bytes(response.body).decode(), code="cors_refused")
        own = {name: value for name, value in response.headers.items() if name.startswith("access-control-")}
        refused.headers.update(own | {"Vary": response.headers.get("vary", "Origin")})
        return refused


def cors_options(config: ServerConfig) -> dict[str, object]:
    """The settings of Cors."""
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": config.allowed_methods,
        "allow_headers": config.allowed_headers,
        "allow_credentials": config.allow_credentials,
        "expose_headers": (REQUEST_ID, WARNING_HEADER, "Retry-After"),
    }


class ApiKeys:
    """401 without one of the keys, where there are any; /health* is always open, /metrics when told so.

    Leaves a name of the key, never the key itself, in `request.state.api_key_name`; None where there are no keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics_open: bool) -> None:
        self._app = app
        self._keys = {key.encode(): key_name(key) for key in keys}
        self._metrics_open = metrics_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = self._name(scope)
            scope.setdefault("state", {})["api_key_name"] = name
            if self._keys and name is None and not self._is_open(route_path(scope)):
                message = "a valid API key is needed: Authorization: Bearer KEY"
                await error_response(401, message, code="invalid_api_key")(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _name(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            # Anthropic's clients send theirs so.
            given = headers.get("x-api-key", "") if under_messages(route_path(scope)) else ""
        if not given:
            return None
        key, found = given.strip().encode("latin-1"), None
        # All of them, whichever fits: the time must not tell how far the search went.
        for known, name in self._keys.items():
            if hmac.compare_digest(key, known):
                found = name
        return found

    def _is_open(self, path: str) -> bool:
        return path == "/health" or path.startswith("/health/") or (path == "/metrics" and self._metrics_open)


def key_name(key: str) -> str:
    """A short name for a key, the same at every start, that does not show it."""
    return "key-" + hashlib.blake2b(key.encode(), digest_size=6, person=b"evensong-key").hexdigest()


def under_messages(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def route_path(scope: Scope) -> str:
    """The path as routes know it: without the prefix of --root-path, where a proxy has left it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


class Failures:
    """A bug in a route is a 500 of the usual form, inside of what adds headers; one in a stream ends the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            logger.error("request failed: %s %s", scope["method"], scope["path"], exc_info=error)
            await exception_response(error)(scope, receive, send)
