"""What every route that reads a form does before its own work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from evensong.entrypoints.http.body import read_form
from evensong.entrypoints.http.middleware import WARNING_HEADER
from evensong.entrypoints.http.schemas import Form
from evensong.entrypoints.http.state import ServerState

F = TypeVar("F", bound=Form)


async def run_form(
    state: ServerState, request: Request, form_type: type[F], handle: Callable[[F, str], Awaitable[Response]]
) -> Response:
    """Readiness first, then the body, then the work; unknown fields are named in a header."""
    state.require_engine()
    config = state.server_config
    form = await read_form(request, form_type, config.max_request_bytes, config.read_timeout)
    unknown = form.unknown_fields()
    response = await handle(form, request.state.request_id)
    if unknown:
        named = ", ".join(unknown)[:1000].encode("ascii", "backslashreplace").decode()
        response.headers[WARNING_HEADER] = "unknown fields ignored: " + "".join(c for c in named if c.isprintable())
    return response
