"""Routes of the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from evensong.entrypoints.http.body import refusal
from evensong.entrypoints.http.forms_out import encode
from evensong.entrypoints.http.openapi import described, described_body, described_query
from evensong.entrypoints.http.responses.create import create_response, followed
from evensong.entrypoints.http.responses.forms import (
    DeletedAnswer,
    InputItemsAnswer,
    InputItemsQuery,
    ResponseAnswer,
    ResponseForm,
    RetrieveQuery,
)
from evensong.entrypoints.http.responses.store import ResponseStore, Stored
from evensong.entrypoints.http.run_form import run_form
from evensong.entrypoints.http.service import key_name
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import RequestError

M = TypeVar("M", bound=BaseModel)


def add_responses(app: FastAPI, state: ServerState) -> None:
    """/v1/responses and what can be done with one that is stored."""
    store = ResponseStore(state.server_config.responses_store_bytes)

    @app.post("/v1/responses", **described_body(ResponseForm, ResponseAnswer, stream=True))
    async def create(request: Request) -> Response:
        """A model's response: text, reasoning, calls of functions."""
        return await run_form(
            state, request, ResponseForm, lambda form, name: create_response(request, state, store, form, name)
        )

    @app.get("/v1/responses/{response_id}", **described_query(RetrieveQuery, ResponseAnswer, stream=True))
    async def retrieve(request: Request, response_id: str) -> Response:
        """A stored response; of one that was streamed in the background also its events, from any on."""
        query = read_query(request, RetrieveQuery)
        return _retrieved(store.find(key_name(request), response_id), query)

    @app.delete("/v1/responses/{response_id}", **described(DeletedAnswer))
    async def delete(request: Request, response_id: str) -> Response:
        """Forgets a stored response; one that runs in the background is ended first."""
        stored = store.find(key_name(request), response_id)
        if not stored.finished and stored.task is None:
            raise _runs(stored)
        await _end(stored)
        store.drop(stored)
        return JSONResponse({"id": stored.id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel", **described(ResponseAnswer))
    async def cancel(request: Request, response_id: str) -> Response:
        """Ends a response that runs in the background; one that has ended stays as it is."""
        stored = store.find(key_name(request), response_id)
        if not stored.background:
            raise RequestError("only a response that runs in the background can be cancelled", param="response_id")
        await _end(stored)
        return Response(stored.response, media_type="application/json")

    @app.get("/v1/responses/{response_id}/input_items", **described_query(InputItemsQuery, InputItemsAnswer))
    async def input_items(request: Request, response_id: str) -> Response:
        """The items of a response's own input, the last one first."""
        query = read_query(request, InputItemsQuery)
        return _listed(store.find(key_name(request), response_id), query)


def read_query(request: Request, form: type[M]) -> M:
    """The query as `form`. Raises RequestError naming a parameter that is wrong, or comes twice."""
    values: dict[str, str] = {}
    for name, text in request.query_params.multi_items():
        if name in values:
            raise RequestError(f"{name!r:.60} comes twice", param=name)
        values[name] = text
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise refusal(error) from error


def _retrieved(stored: Stored, query: RetrieveQuery) -> Response:
    if query.stream != "true":
        if query.starting_after is not None:
            raise RequestError("starting_after needs stream=true", param="starting_after")
        return Response(stored.response, media_type="application/json")
    if stored.log is None:
        raise RequestError(
            "only a response that was made with background=true and stream=true has a stream", param="stream"
        )
    return followed(stored.log, 0 if query.starting_after is None else query.starting_after + 1)


async def _end(stored: Stored) -> None:
    if stored.task is not None and not stored.finished:
        stored.task.cancel()
        await asyncio.wait([stored.task])


def _runs(stored: Stored) -> RequestError:
    return RequestError(f"the response {stored.id!r} is being made", status=409, code="in_progress")


def _listed(stored: Stored, query: InputItemsQuery) -> Response:
    items: list[dict[str, Any]] = [_shown(item) for item in msgspec.json.decode(stored.items)]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == query.after), None)
        if place is None:
            raise RequestError(f"there is no item {query.after!r:.200}", status=404, param="after", code="not_found")
        items = items[place + 1 :]
    page = items[: query.limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    answer = {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}
    return Response(encode(answer), media_type="application/json")


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input with its text in parts, as clients expect it."""
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": item["content"]}
        return {**item, "content": [part | ({"annotations": []} if kind == "output_text" else {})]}
    return item
