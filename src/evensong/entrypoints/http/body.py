"""Request bodies: bounded while they arrive, strict JSON, checked against a form; large ones off the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from evensong.entrypoints.http.schemas import Form
from evensong.protocol.errors import RequestError

F = TypeVar("F", bound=Form)

# Larger bodies are parsed in a thread: a megabyte takes milliseconds, which others would wait.
INLINE_BYTES = 64 * 1024


async def read_form(request: Request, form: type[F], max_bytes: int) -> F:
    """The body as `form`. Raises RequestError: 413 for a body over `max_bytes`, 400 for anything else."""
    body = await _read(request, max_bytes)
    if len(body) <= INLINE_BYTES:
        return parse(body, form)
    return await asyncio.to_thread(parse, body, form)


def parse(body: bytes, form: type[F]) -> F:
    """Strict JSON: no NaN, no Infinity, UTF-8 only, an object at the top."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as error:
        raise RequestError("the client left before its body was whole") from error
    return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {max_bytes} bytes", status=413, code="request_too_large")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refusal(error: ValidationError) -> RequestError:
    """The first complaint, naming the field as the user wrote it."""
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Alternatives of a union appear in the path by type name; a user knows the field only.
    field = str(first["loc"][0]) if first["loc"] else None
    where = f"{field}: " if field else ""
    return RequestError(f"{where}{first['msg']}", param=field)
