"""POST /v1/responses: whole, streamed, or in the background."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from evensong.entrypoints.http.errors import of_exception
from evensong.entrypoints.http.forms_out import encode, sse
from evensong.entrypoints.http.generation import respond_whole
from evensong.entrypoints.http.responses.forms import ResponseForm
from evensong.entrypoints.http.responses.store import PREFIX, EventLog, ResponseStore, Stored
from evensong.entrypoints.http.responses.translate import NAMES, input_items, translate
from evensong.entrypoints.http.responses.writer import Event, ResponseWriter
from evensong.entrypoints.http.said import what_is_said
from evensong.entrypoints.http.service import key_name
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.streaming import event_stream, respond_bytes
from evensong.entrypoints.http.translated import renamed
from evensong.entrypoints.http.turn import Turn, prepare_turn
from evensong.protocol.errors import EvensongError, RequestError
from evensong.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass
class Run:
    """One response on its way."""

    turn: Turn
    writer: ResponseWriter
    store: ResponseStore
    stored: Stored | None

    async def events(self) -> AsyncIterator[Event]:
        """All events of a job that has begun. Raises what the engine ends it with."""
        for event in self.writer.opened():
            yield event
        async for said in what_is_said(self.turn):
            for event in self.writer.add(said):
                yield event

    def keep(self) -> None:
        """The response as it is goes into the store; one that has not ended was left alone by its client."""
        self.writer.cancelled()
        if self.stored is not None and not self.stored.finished:
            self.store.close(self.stored, self.writer.response())

    def forget(self) -> None:
        """Nobody was told of this response."""
        if self.stored is not None and not self.stored.finished:
            self.store.drop(self.stored)

    def failed(self, error: Exception) -> list[Event]:
        """The last events, after an error."""
        if not isinstance(error, EvensongError):
            logger.error("response %s failed", self.turn.job.request_id, exc_info=error)
        status, body, _ = of_exception(error)
        return self.writer.failed(status, body["error"])


async def create_response(
    request: Request, state: ServerState, store: ResponseStore, form: ResponseForm, request_id: str
) -> Response:
    """The response, its stream, or its beginning where it goes on in the background."""
    state.require_engine(form.model)
    if form.background and not store.keeps_some:
        raise RequestError("this server keeps no responses (--responses-store-bytes 0)", param="background")
    owner = key_name(request)
    earlier = store.items_before(owner, form.previous_response_id)
    items = [_resolved(store, owner, item) for item in input_items(form)]
    chat = await asyncio.to_thread(translate, form, earlier, items)
    try:
        turn = await prepare_turn(request, state, chat, request_id)
    except RequestError as error:
        raise renamed(error, NAMES) from error
    if chat.logprobs and not turn.parser(0).plain:
        raise RequestError(
            "log-probabilities are given where all of a response is text: not with tools or a reasoning parser",
            param="include",
        )
    stored = None
    if form.store is not False:
        # A caller may use one X-Request-Id twice; a response that is kept has its id for itself.
        name = request_id if not store.holds(request_id) else secrets.token_hex(12)
        turn.job.request_id = name
        stored = Stored(name, owner, form.previous_response_id, encode(_numbered(items, name)))
        stored.background = bool(form.background)
        store.open(stored)
    return await _run(request, state, form, turn, store, stored)


async def _run(
    request: Request,
    state: ServerState,
    form: ResponseForm,
    turn: Turn,
    store: ResponseStore,
    stored: Stored | None,
) -> Response:
    frame = _frame(state, form, turn)
    if stored is not None:
        # What is seen of it before it begins.
        stored.response = encode({**frame, "status": "in_progress", "output": [], "usage": None})
    run = Run(turn, ResponseWriter(frame, turn.job.request_id), store, stored)
    try:
        if form.background and stored is not None:
            return await _in_background(state, form, run)
        if form.stream:
            return await respond_bytes(state, turn.job, _begun(state, form, run), run.keep)
        response = await respond_whole(request, state, turn.job, lambda: _whole(state, form, run))
    except RequestError as error:
        run.forget()
        raise renamed(error, NAMES) from error
    except BaseException:
        run.forget()
        raise
    run.forget()
    return response


def _start(state: ServerState, form: ResponseForm, run: Run) -> None:
    """The job has begun, and with it the seed is known."""
    run.writer = ResponseWriter(_frame(state, form, run.turn, run.turn.job.seed), run.turn.job.request_id)
    if run.stored is not None:
        run.stored.response = encode(run.writer.response())


async def _whole(state: ServerState, form: ResponseForm, run: Run) -> dict[str, Any]:
    _start(state, form, run)
    async for _ in run.events():
        pass
    run.keep()
    return run.writer.response()


async def _begun(state: ServerState, form: ResponseForm, run: Run) -> AsyncIterator[bytes]:
    """The events of a stream; an error becomes its last one."""
    _start(state, form, run)
    try:
        async for event in run.events():
            if run.writer.ended:
                # Before the client knows that it has ended: its next request may continue it.
                run.keep()
            yield sse(event)
    except Exception as error:
        for event in run.failed(error):
            run.keep()
            yield sse(event)


async def _in_background(state: ServerState, form: ResponseForm, run: Run) -> Response:
    """Admits the job, and answers while it runs: with the response so far, or with the events as they come."""
    assert run.stored is not None
    state.enter()
    try:
        await run.turn.job.start()
    except BaseException:
        state.leave()
        raise
    _start(state, form, run)
    if form.stream:
        run.stored.log = EventLog()
    run.stored.task = asyncio.create_task(_detached(state, run), name=f"response-{run.stored.name}")
    # A task that is cancelled before its first step would not even see that.
    await asyncio.sleep(0)
    if run.stored.log is not None:
        return followed(run.stored.log, 0)
    return Response(encode(run.writer.response()), media_type="application/json")


async def _detached(state: ServerState, run: Run) -> None:
    """Runs a response to its end, whoever is connected; the store shows how far it is."""
    stored = run.stored
    assert stored is not None
    log = stored.log
    try:
        async for event in run.events():
            if log is not None:
                log.append(sse(event))
    except asyncio.CancelledError:
        _log(log, run.writer.cancelled())
    except Exception as error:
        _log(log, run.failed(error))
    finally:
        run.keep()
        await asyncio.shield(run.turn.job.stop())
        state.leave()


def _log(log: EventLog | None, events: list[Event]) -> None:
    if log is not None:
        for event in events:
            log.append(sse(event))


def followed(log: EventLog, start: int) -> Response:
    """A stream of the events of a response that runs in the background, from number `start` on."""
    return event_stream(log.follow(start))


def _resolved(store: ResponseStore, owner: str | None, item: Any) -> dict[str, Any]:
    """An item; in place of a reference the one that it names."""
    if isinstance(item, dict) and item.get("type") == "item_reference":
        reference = item.get("id")
        if not isinstance(reference, str):
            raise RequestError("the id of an item_reference must be a string", param="input")
        return store.item(owner, reference)
    return dict(item)


def _numbered(items: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The items as they are stored: each with an id, and with its type."""
    numbered = []
    for index, item in enumerate(items):
        given = item.get("id")
        item_id = given if isinstance(given, str) and given else f"in_{name}_{index}"
        numbered.append({**item, "id": item_id, "type": item.get("type") or "message"})
    return numbered


def _frame(state: ServerState, form: ResponseForm, turn: Turn, seed: int | None = None) -> dict[str, Any]:
    """The fields of a response that do not depend on what the model says."""
    params = turn.job.params
    reasoning, text = form.reasoning, form.text
    return {
        "id": PREFIX + turn.job.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": bool(form.background),
        "error": None,
        "incomplete_details": None,
        "instructions": form.instructions,
        "max_output_tokens": form.max_output_tokens,
        "max_tool_calls": form.max_tool_calls,
        "metadata": form.metadata or {},
        "model": state.model_name,
        "parallel_tool_calls": form.parallel_tool_calls is not False,
        "previous_response_id": form.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "service_tier": "default",
        "store": form.store is not False,
        "temperature": params.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}},
        "tool_choice": form.tool_choice or "auto",
        "tools": form.tools or [],
        "top_logprobs": form.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": form.truncation or "disabled",
        "user": form.user,
        "seed": seed,
        "system_fingerprint": turn.job.engine.resources.fingerprint,
    }
