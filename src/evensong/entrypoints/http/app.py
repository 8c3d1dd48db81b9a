"""The FastAPI application: which route leads where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import evensong
from evensong.entrypoints.http import info
from evensong.entrypoints.http.body import read_form
from evensong.entrypoints.http.chat import create_chat_completion
from evensong.entrypoints.http.completions import create_completion
from evensong.entrypoints.http.errors import error_response, exception_response
from evensong.entrypoints.http.middleware import ApiKey, RequestIds
from evensong.entrypoints.http.schemas import ChatForm, CompletionForm, DetokenizeForm, Form, TokenizeForm
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import EvensongError
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

WARNING_HEADER = "X-Evensong-Warning"
F = TypeVar("F", bound=Form)


def create_app(state: ServerState) -> FastAPI:
    """The application around `state`, which changes as the engine starts, drains or dies."""
    # A redirect would be built from the Host header, which is the caller's.
    app = FastAPI(title="evensong", version=evensong.__version__, redirect_slashes=False)
    app.add_middleware(ApiKey, state=state)
    app.add_middleware(RequestIds)
    _add_error_handlers(app)
    _add_information(app, state)
    _add_generation(app, state)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return exception_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: f"there is no route {request.scope['path']:.200}", 405: f"{request.method} is not allowed here"}
        message = words.get(error.status_code, str(error.detail))
        response = error_response(error.status_code, message)
        response.headers.update(error.headers or {})
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("request failed: %s %s", request.method, request.url.path, exc_info=error)
        return exception_response(error)

    app.add_exception_handler(EvensongError, known)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)


def _add_information(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether the server lives."""
        return info.health(state)

    @app.get("/health/ready")
    async def health_ready() -> Response:
        """Whether the server can take work."""
        return info.ready(state)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return info.metrics(state)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Version and fingerprint."""
        return info.version(state)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return info.models(state)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return info.model(state, name)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    async def run(request: Request, form_type: type[F], handle: Callable[[F, str], Awaitable[Response]]) -> Response:
        """Readiness first, then the body, then the work; unknown fields are named in a header."""
        state.require_engine()
        form = await read_form(request, form_type, state.server_config.max_request_bytes)
        unknown = form.unknown_fields()
        response = await handle(form, request.state.request_id)
        if unknown:
            named = ", ".join(unknown)[:1000].encode("ascii", "backslashreplace").decode()
            response.headers[WARNING_HEADER] = "unknown fields ignored: " + "".join(c for c in named if c.isprintable())
        return response

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionForm))
    async def completions(request: Request) -> Response:
        """Text that follows a prompt."""
        return await run(request, CompletionForm, lambda form, name: create_completion(request, state, form, name))

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatForm))
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        return await run(request, ChatForm, lambda form, name: create_chat_completion(request, state, form, name))

    @app.post("/tokenize", openapi_extra=_body_of(TokenizeForm))
    async def tokenize(request: Request) -> Response:
        """Text or messages to token ids."""

        async def handle(form: TokenizeForm, name: str) -> Response:
            return JSONResponse(await info.tokenize(state, form))

        return await run(request, TokenizeForm, handle)

    @app.post("/detokenize", openapi_extra=_body_of(DetokenizeForm))
    async def detokenize(request: Request) -> Response:
        """Token ids to text."""

        async def handle(form: DetokenizeForm, name: str) -> Response:
            return JSONResponse(await info.detokenize(state, form))

        return await run(request, DetokenizeForm, handle)


def _body_of(form: type[Form]) -> dict[str, Any]:
    """The request body's schema for the OpenAPI page: bodies are read by hand, so FastAPI cannot know it."""
    schema = form.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
