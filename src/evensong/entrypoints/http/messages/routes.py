"""Routes of the Messages API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from evensong.entrypoints.http.errors import of_exception
from evensong.entrypoints.http.forms_out import sse
from evensong.entrypoints.http.generation import respond_whole
from evensong.entrypoints.http.messages.errors import message_error
from evensong.entrypoints.http.messages.forms import (
    CountAnswer,
    MessageAnswer,
    MessageError,
    MessageForm,
    PromptForm,
)
from evensong.entrypoints.http.messages.translate import NAMES, translate
from evensong.entrypoints.http.messages.writer import MessageWriter
from evensong.entrypoints.http.openapi import described_body
from evensong.entrypoints.http.run_form import run_form
from evensong.entrypoints.http.said import what_is_said
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.streaming import respond_bytes
from evensong.entrypoints.http.translated import renamed
from evensong.entrypoints.http.turn import Turn, prepare_turn
from evensong.protocol.errors import EvensongError, RequestError
from evensong.utils.logging import get_logger

logger = get_logger(__name__)


def add_messages(app: FastAPI, state: ServerState) -> None:
    """/v1/messages, and how many tokens a prompt has."""

    @app.post("/v1/messages", **described_body(MessageForm, MessageAnswer, stream=True, error=MessageError))
    async def create(request: Request) -> Response:
        """The assistant's next message, in the form of Anthropic's API."""
        return await run_form(
            state, request, MessageForm, lambda form, name: create_message(request, state, form, name)
        )

    @app.post("/v1/messages/count_tokens", **described_body(PromptForm, CountAnswer, error=MessageError))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has."""

        async def handle(form: PromptForm, name: str) -> Response:
            turn = await _turn(request, state, form, name)
            inputs = turn.job.engine.front.inputs
            special = bool(turn.form.add_special_tokens)
            tokens = await asyncio.to_thread(inputs.encode, turn.prompt, add_special_tokens=special)
            return JSONResponse({"input_tokens": len(tokens)})

        return await run_form(state, request, PromptForm, handle)


async def create_message(request: Request, state: ServerState, form: MessageForm, request_id: str) -> Response:
    """The message, or its stream."""
    turn = await _turn(request, state, form, request_id)
    try:
        if form.stream:
            return await respond_bytes(state, turn.job, _events(state, form, turn))
        return await respond_whole(request, state, turn.job, lambda: _whole(state, form, turn))
    except RequestError as error:
        raise renamed(error, NAMES) from error


async def _turn(request: Request, state: ServerState, form: PromptForm, request_id: str) -> Turn:
    state.require_engine(form.model)
    chat = await asyncio.to_thread(translate, form, reasons=state.engine_config.model.reasoning_parser is not None)
    try:
        return await prepare_turn(request, state, chat, request_id)
    except RequestError as error:
        raise renamed(error, NAMES) from error


def _writer(state: ServerState, form: MessageForm, turn: Turn) -> MessageWriter:
    """For a job that has begun: with it the seed is known."""
    frame = {
        "id": f"msg_{turn.job.request_id}",
        "type": "message",
        "role": "assistant",
        "model": state.model_name,
        "seed": turn.job.seed,
        "system_fingerprint": turn.job.engine.resources.fingerprint,
    }
    return MessageWriter(frame, form.max_tokens)


async def _whole(state: ServerState, form: MessageForm, turn: Turn) -> dict[str, Any]:
    writer = _writer(state, form, turn)
    async for said in what_is_said(turn):
        writer.add(said)
    return writer.message()


async def _events(state: ServerState, form: MessageForm, turn: Turn) -> AsyncIterator[bytes]:
    """The events of a stream; an error becomes its last one."""
    writer = _writer(state, form, turn)
    try:
        async for said in what_is_said(turn):
            for event in writer.add(said):
                yield sse(event)
    except Exception as error:
        if not isinstance(error, EvensongError):
            logger.exception("message %s failed in its stream", turn.job.request_id)
        status, body, _ = of_exception(error)
        yield sse(message_error(status, body["error"], turn.job.request_id))
