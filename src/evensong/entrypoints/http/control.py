"""Routes of the control verbs, made from protocol/control.py, and the abort of requests by the ids that callers know.

They need a key; where none is set, the caller must be on this machine.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, get_args

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import Request

from evensong.engine.async_llm import AsyncLLM
from evensong.entrypoints.http.body import read_form, refusal
from evensong.entrypoints.http.openapi import described_body, described_query, object_of
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.control import VERBS, Arg, Verb
from evensong.protocol.errors import RequestError

MAX_TIMEOUT = 86400.0
# What the `id` of a response has before the request's own id.
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class AbortForm(BaseModel):
    """POST /abort_requests."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: list[str] = Field(max_length=10_000)


def add_control(app: FastAPI, state: ServerState) -> None:
    """One route a verb that has one, and /abort_requests."""
    for verb in VERBS.values():
        if verb.route is not None:
            _add_verb(app, state, verb)

    @app.post("/abort_requests", **described_body(AbortForm, object_of(aborted="integer")), tags=["control"])
    async def abort_requests(request: Request) -> dict[str, Any]:
        """Ends requests by X-Request-Id or by the id of their response; ids that are not known are ignored."""
        check_may_control(request, state)
        engine = state.require_engine()
        config = state.server_config
        form = await read_form(request, AbortForm, config.max_request_bytes, config.read_timeout)
        return {"aborted": await _abort(engine, form.request_ids)}


def check_may_control(request: Request, state: ServerState) -> None:
    """Raises RequestError unless the request bears a key or, without keys, comes from this machine and no web page.

    The address is the socket's own; headers that a proxy adds are not believed.
    """
    if state.server_config.api_key:
        return  # nothing gets here without one
    host = request.client.host if request.client is not None else ""
    if not _is_loopback(host):
        raise RequestError(
            "control routes need a key; without --api-key they serve callers on this machine only",
            status=403,
            type="permission_error",
            code="control_refused",
        )
    origin = request.headers.get("origin")
    # Any page in a browser on this machine can send a POST here, without asking first.
    if origin is not None and origin not in state.server_config.allowed_origins:
        raise RequestError(
            "control routes without a key serve web pages of --allowed-origins only",
            status=403,
            type="permission_error",
            code="control_refused",
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _add_verb(app: FastAPI, state: ServerState, verb: Verb) -> None:
    assert verb.route is not None
    route, form = verb.route, _form_of(verb)

    async def endpoint(request: Request) -> dict[str, Any]:
        check_may_control(request, state)
        engine = state.require_engine()
        config = state.server_config
        if route.body:
            given = await read_form(request, form, config.max_request_bytes, config.read_timeout)
        else:
            given = _from_query(form, verb, request)
        arguments = given.model_dump(exclude_unset=True)
        try:
            result = await engine.call_verb(verb.name, **arguments)
        except TimeoutError as error:
            # It stays in force: a pause that waits for its requests goes on waiting.
            raise RequestError(str(error), status=408, code="timeout", param="timeout") from error
        return {route.key: route.done or result}

    describe = described_body if route.body else described_query
    app.add_api_route(
        f"/{verb.name}",
        endpoint,
        methods=[route.method],
        name=verb.name,
        summary=verb.name.replace("_", " "),
        description=verb.doc,
        tags=["control"],
        **describe(form, object_of(**{route.key: "string" if route.done else route.kind})),
    )


def _form_of(verb: Verb) -> type[BaseModel]:
    """A form with the verb's arguments. A query holds texts, so only a body is strict about types."""
    assert verb.route is not None
    fields: dict[str, Any] = {arg.name: (arg.type, _field(arg)) for arg in verb.params}
    config = ConfigDict(strict=verb.route.body, extra="forbid", allow_inf_nan=False)
    name = "".join(part.capitalize() for part in verb.name.split("_"))
    return create_model(f"{name}Form", __config__=config, __doc__=verb.doc, **fields)


def _field(arg: Arg) -> Any:
    default = ... if arg.required else arg.default
    return Field(default, ge=0, le=MAX_TIMEOUT) if arg.name == "timeout" else Field(default)


def _from_query(form: type[BaseModel], verb: Verb, request: Request) -> BaseModel:
    """The arguments in the query: a list's items come one by one, or with commas between."""
    args = {arg.name: arg for arg in verb.params}
    values: dict[str, Any] = {}
    for name in request.query_params:
        texts = request.query_params.getlist(name)
        if name in args and "list" in str(args[name].type):
            values[name] = [part for text in texts for part in text.split(",")]
            continue
        if len(texts) > 1:
            raise RequestError(f"{name} comes twice", param=name)
        # Among literal numbers a text is none of them.
        numbers = name in args and any(isinstance(choice, int) for choice in get_args(args[name].type))
        values[name] = int(texts[0]) if numbers and re.fullmatch("[0-9]{1,9}", texts[0]) else texts[0]
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise refusal(error) from error


async def _abort(engine: AsyncLLM, given: list[str]) -> int:
    """How many requests were running under these ids, and end now."""
    outputs = engine.front.outputs
    known: dict[str, set[str]] = {}
    for name in outputs.request_ids():
        known.setdefault(name, set()).add(name)
        parent, _, number = name.rpartition("-")
        if number.isdigit():
            # A request of several prompts runs under one id a prompt.
            known.setdefault(parent, set()).add(name)
    found: set[str] = set()
    for text in given:
        bare = next((text.removeprefix(prefix) for prefix in _PREFIXES if text.startswith(prefix)), text)
        names = known.get(text) or known.get(bare) or set()
        found |= {bare} if bare in names else names
    for name in sorted(found):
        await engine.abort(name)
    return len(found)
