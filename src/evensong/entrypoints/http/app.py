"""The FastAPI application: which route leads where."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

import evensong
from evensong.entrypoints.http import info
from evensong.entrypoints.http.chat import create_chat_completion
from evensong.entrypoints.http.completions import create_completion
from evensong.entrypoints.http.control import add_control
from evensong.entrypoints.http.docs_page import docs_page
from evensong.entrypoints.http.errors import error_response, exception_response
from evensong.entrypoints.http.forms_described import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    VersionAnswer,
)
from evensong.entrypoints.http.messages.errors import MessageErrors
from evensong.entrypoints.http.messages.routes import add_messages
from evensong.entrypoints.http.middleware import (
    ApiKeys,
    Cors,
    Failures,
    RequestIds,
    cors_options,
)
from evensong.entrypoints.http.openapi import describe_app, described, described_body, object_of
from evensong.entrypoints.http.responses.routes import add_responses
from evensong.entrypoints.http.run_form import run_form
from evensong.entrypoints.http.schemas import ChatForm, CompletionForm, DetokenizeForm, TokenizeForm
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import EvensongError


def create_app(state: ServerState) -> FastAPI:
    """The application around `state`, which changes as the engine starts, drains or dies."""
    config = state.server_config
    app = FastAPI(
        title="evensong",
        version=evensong.__version__,
        # A redirect would be built from the Host header, which is the caller's.
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
    )
    # From the inside to the outside: what adds headers sees every response, refusals and failures too.
    app.add_middleware(Failures)
    app.add_middleware(ApiKeys, keys=config.api_key, metrics_open=config.metrics_no_auth)
    app.add_middleware(MessageErrors)
    if config.allowed_origins:
        app.add_middleware(Cors, **cors_options(config))  # type: ignore[arg-type]  # one dict for all kinds
    traces = state.engine_config.observability.otlp_traces_endpoint is not None
    app.add_middleware(RequestIds, root_path=config.root_path, log=config.access_log, traces=traces)
    _add_error_handlers(app)
    # First, as routes are tried in order.
    _add_generation(app, state)
    _add_health(app, state)
    _add_information(app, state)
    add_responses(app, state)
    add_messages(app, state)
    _add_tokenizing(app, state)
    add_control(app, state)
    describe_app(app, with_keys=bool(config.api_key))
    if not config.disable_fastapi_docs:
        app.add_route("/docs", lambda request: docs_page(app.openapi()), include_in_schema=False)
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
        if error.status_code == 405:
            # A path may have several routes, and HEAD goes where GET does.
            routes = [r for r in app.routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE]
            methods = {method for route in routes for method in route.methods or ()}
            response.headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        return response

    app.add_exception_handler(EvensongError, known)
    app.add_exception_handler(HTTPException, http_error)


def _add_health(app: FastAPI, state: ServerState) -> None:
    status = described(object_of(status="string"))

    @app.get("/health", **status, tags=["health"])
    async def health() -> Response:
        """Whether the server lives."""
        return info.health(state)

    @app.get("/health/ready", **status, tags=["health"])
    async def health_ready() -> Response:
        """Whether the server can take work now."""
        return info.ready(state)

    @app.get("/health/progress", **described(object_of(status="string", num_steps="integer")), tags=["health"])
    async def health_progress() -> Response:
        """Whether the engine comes forward, where it has work."""
        return info.progress(state)

    @app.get("/ping", **status, tags=["health"])
    @app.post("/ping", **status, tags=["health"])
    async def ping() -> Response:
        """The same as /health, under the name that SageMaker uses."""
        return info.health(state)


def _add_information(app: FastAPI, state: ServerState) -> None:
    @app.get("/metrics", **described({"type": "string"}, kind="text/plain"), response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return info.metrics(state)

    @app.get("/load", **described(object_of(server_load="integer")))
    async def load() -> dict[str, Any]:
        """Generation requests that this server has in hand."""
        return info.load(state)

    @app.get("/version", **described(VersionAnswer))
    async def version() -> dict[str, Any]:
        """Version and fingerprint."""
        return info.version(state)

    @app.get("/v1/models", **described(ModelList))
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return info.models(state)

    @app.get("/v1/models/{name:path}", **described(ModelCard))
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return info.model(state, name)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions", **described_body(CompletionForm, CompletionAnswer, stream=True))
    async def completions(request: Request) -> Response:
        """Text that follows a prompt."""
        return await run_form(
            state, request, CompletionForm, lambda form, name: create_completion(request, state, form, name)
        )

    @app.post("/v1/chat/completions", **described_body(ChatForm, ChatAnswer, stream=True))
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        return await run_form(
            state, request, ChatForm, lambda form, name: create_chat_completion(request, state, form, name)
        )


def _add_tokenizing(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize", **described_body(TokenizeForm, TokenizeAnswer))
    async def tokenize(request: Request) -> Response:
        """Text or messages to token ids."""

        async def handle(form: TokenizeForm, name: str) -> Response:
            return JSONResponse(await info.tokenize(state, form))

        return await run_form(state, request, TokenizeForm, handle)

    @app.post("/detokenize", **described_body(DetokenizeForm, DetokenizeAnswer))
    async def detokenize(request: Request) -> Response:
        """Token ids to text."""

        async def handle(form: DetokenizeForm, name: str) -> Response:
            return JSONResponse(await info.detokenize(state, form))

        return await run_form(state, request, DetokenizeForm, handle)
