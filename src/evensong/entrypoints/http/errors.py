"""OpenAI error bodies: the only form in which this server says no."""

from __future__ import annotations

import http
from typing import Any

from starlette.responses import JSONResponse, Response

from evensong.protocol.errors import EngineDeadError, EvensongError, RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(message: str, type: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """`{"error": {...}}` as the OpenAI API has it."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    type: str | None = None,
    param: str | None = None,
    code: str | None = None,
    retry_after: int | None = None,
) -> Response:
    """A response with an error body. Characters that no UTF-8 can hold are escaped, so the body is always valid."""
    kind = type or _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    clean = message.encode("utf-8", "backslashreplace").decode()
    return JSONResponse(
        error_body(clean, kind, param, code or http.HTTPStatus(status).phrase), status, _headers(status, retry_after)
    )


def of_exception(error: Exception) -> tuple[int, dict[str, Any], int | None]:
    """Status, body and Retry-After for what a request ended with."""
    if isinstance(error, RequestError):
        clean = error.message.encode("utf-8", "backslashreplace").decode()
        return error.status, error_body(clean, error.type, error.param, error.code), error.retry_after
    if isinstance(error, EngineDeadError):
        return 500, error_body(f"the engine died: {error}", "engine_dead"), None
    if isinstance(error, EvensongError):
        return 500, error_body(str(error), "internal_error"), None
    return 500, error_body(f"internal error: {type(error).__name__}", "internal_error"), None


def exception_response(error: Exception) -> Response:
    """The response for what a request ended with."""
    status, body, retry_after = of_exception(error)
    return JSONResponse(body, status, _headers(status, retry_after))


def _headers(status: int, retry_after: int | None) -> dict[str, str]:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if status == 408:
        # The rest of the body would be waited for.
        headers["Connection"] = "close"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
