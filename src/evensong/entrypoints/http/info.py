"""Everything that generates nothing: models, tokenizing, health, metrics, version."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse, Response

import evensong
from evensong.engine.frontend.chat_tools import check_tools
from evensong.entrypoints.http.errors import error_response
from evensong.entrypoints.http.parsers.choose import tool_format
from evensong.entrypoints.http.schemas import DetokenizeForm, TokenizeForm
from evensong.entrypoints.http.state import RETRY_AFTER_SECONDS, ServerState
from evensong.entrypoints.http.templates import render_prompt
from evensong.observe.metrics import CONTENT_TYPE
from evensong.protocol.errors import RequestError


def health(state: ServerState) -> Response:
    """200 while the server lives, 503 with the cause once the engine died."""
    if (reason := state.death()) is not None:
        return error_response(503, f"the engine died: {reason}", type="engine_dead")
    answer = {"status": "ok"}
    if (held := state.held()) is not None:
        answer["held"] = held
    return JSONResponse(answer)


def progress(state: ServerState) -> Response:
    """200 while steps advance or there is nothing to do, else 503 with the reason."""
    death = state.death()
    reason = state.stuck() if death is None else f"the engine died: {death}"
    if reason is not None:
        return error_response(503, reason, type="server_error", code="no_progress", retry_after=RETRY_AFTER_SECONDS)
    busy = state.engine is not None and state.engine.front.outputs.num_requests > 0
    return JSONResponse({"status": "busy" if busy else "idle", "num_steps": state.progress.num_steps})


def load(state: ServerState) -> dict[str, Any]:
    """Generation requests that this server has in hand."""
    return {"server_load": state.num_active}


def ready(state: ServerState) -> Response:
    """200 when work can be taken, else 503 with the reason."""
    reason = state.not_ready() or state.held()
    if reason is not None:
        return error_response(503, reason, type="server_error", code="not_ready", retry_after=RETRY_AFTER_SECONDS)
    return JSONResponse({"status": "ready"})


def metrics(state: ServerState) -> Response:
    """Prometheus text; empty until the engine is there."""
    engine = state.engine
    return Response(b"" if engine is None else engine.front.outputs.metrics.render(), media_type=CONTENT_TYPE)


def version(state: ServerState) -> dict[str, Any]:
    """Version, and what the bits of an answer depend on."""
    answer: dict[str, Any] = {"version": evensong.__version__}
    if state.engine is not None:
        resources = state.engine.resources
        parts = resources.fingerprint_parts
        answer |= {
            "fingerprint": resources.fingerprint,
            "fingerprint_parts": parts,
            "kernels": {name: parts[name] for name in ("kernel_build", "isa", "mode") if name in parts},
            "deterministic": resources.deterministic,
        }
    return answer


def models(state: ServerState) -> dict[str, Any]:
    """The one model that is served."""
    engine = state.require_engine()
    card = {
        "id": state.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "evensong",
        "root": state.model_name,
        "max_model_len": engine.resources.max_model_len,
    }
    return {"object": "list", "data": [card]}


def model(state: ServerState, name: str) -> dict[str, Any]:
    """One model by name."""
    state.require_engine(name)
    card: dict[str, Any] = models(state)["data"][0]
    return card


async def tokenize(state: ServerState, form: TokenizeForm) -> dict[str, Any]:
    """Token ids of a prompt or of a conversation."""
    inputs = state.require_engine(form.model).front.inputs
    if (form.prompt is None) == (form.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if form.messages is None:
        text, special = form.prompt or "", form.add_special_tokens is not False
    else:
        tools = check_tools(form.tools)
        style = tool_format(state.server_config.tool_call_parser, inputs.tokenizer.chat_template)
        text = await render_prompt(state, inputs.chat_template, form.messages, form, tools, style)
        special = bool(form.add_special_tokens)
    tokens = await asyncio.to_thread(inputs.encode, text, add_special_tokens=special)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": inputs.max_model_len, "tokens": tokens}
    answer["token_strs"] = [inputs.tokenizer.id_to_token(i) for i in tokens] if form.return_token_strs else None
    return answer


async def detokenize(state: ServerState, form: DetokenizeForm) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    inputs = state.require_engine(form.model).front.inputs
    if len(form.tokens) > inputs.max_model_len:
        raise RequestError(
            f"there are {len(form.tokens)} tokens, more than max_model_len {inputs.max_model_len}", param="tokens"
        )
    inputs.check_token_ids(form.tokens, "tokens")
    text = await asyncio.to_thread(inputs.tokenizer.decode, form.tokens, False)
    return {"prompt": text}
