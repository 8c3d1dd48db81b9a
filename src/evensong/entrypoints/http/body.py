"""Request bodies: bounded while they arrive, strict JSON, checked against a form; large ones off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from evensong.protocol.errors import RequestError

F = TypeVar("F", bound=BaseModel)

# Larger bodies are parsed in a thread: a megabyte takes milliseconds, which others would wait.
INLINE_BYTES = 64 * 1024
# The parser holds the interpreter lock for as long as it runs, in whatever thread. A text of any length is quick; what
# takes time is the number of values, and above all of containers and keys: at these limits it is about 50 ms.
MAX_VALUES = 400_000
MAX_CONTAINERS = 100_000
# Far below the interpreter's recursion limit, so that whatever walks a parsed body has room.
MAX_DEPTH = 64

_STRING = re.compile(rb'"[^"]*+"?')


async def read_form(request: Request, form: type[F], max_bytes: int, seconds: float = 0.0) -> F:
    """The body as `form`. Raises RequestError: 415, 413 for a body over `max_bytes`, 408 for one that has not come
    within `seconds` (0: no limit), 400 for anything else.
    """
    _check_type(request.headers.get("content-type"))
    try:
        async with asyncio.timeout(seconds or None):
            body = await _read(request, max_bytes)
    except TimeoutError as error:
        message = f"the body did not come within {seconds:g} s"
        raise RequestError(message, status=408, code="request_timeout") from error
    if len(body) <= INLINE_BYTES:
        return parse(body, form)
    return await asyncio.to_thread(parse, body, form)


def parse(body: bytes, form: type[F]) -> F:
    """Strict JSON: no NaN, no Infinity, no key twice, UTF-8 only, bounded depth and size, an object at the top."""
    _check_size(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _check_depth(body, value)
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise refusal(error) from error


def _check_type(given: str | None) -> None:
    """A browser sends other types without asking; one that is not given is taken as JSON."""
    kind = "application/json" if given is None else given.split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            "the body must be sent with Content-Type: application/json", status=415, code="unsupported_media_type"
        )


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


def _check_size(body: bytes) -> None:
    """Raises RequestError for too many values; commas and brackets within strings do not count."""
    if body.count(b",") < MAX_VALUES and _containers(body, 0, len(body)) <= MAX_CONTAINERS:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, containers, position = 1, 0, 0
    while position < len(bare):
        string = _STRING.search(bare, position)
        end = len(bare) if string is None else string.start()
        values += bare.count(b",", position, end)
        containers += _containers(bare, position, end)
        if values > MAX_VALUES or containers > MAX_CONTAINERS:
            raise RequestError(
                f"the body holds more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays, objects and keys",
                code="request_too_large",
            )
        position = end if string is None else string.end()


def _containers(body: bytes, start: int, end: int) -> int:
    return sum(body.count(mark, start, end) for mark in (b"[", b"{", b":"))


def _check_depth(body: bytes, value: dict[str, Any]) -> None:
    if _containers(body, 0, len(body)) <= MAX_DEPTH:
        return
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        items = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)]
        level = [item for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without ambiguity: what a key means must not depend on who reads it."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.60} comes twice in an object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def refusal(error: ValidationError) -> RequestError:
    """The first complaint, naming the field as the user wrote it."""
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Alternatives of a union appear in the path by type name; a user knows the field only.
    field = str(first["loc"][0]) if first["loc"] else None
    where = f"{field}: " if field else ""
    return RequestError(f"{where}{first['msg']}", param=field)
