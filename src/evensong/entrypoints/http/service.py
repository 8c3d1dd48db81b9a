"""Priority and time limits over HTTP: from the form to the engine, and what a request over its time is answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request

from evensong.entrypoints.http.schemas import GenerationForm
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput, RequestOutput

REQUEST_TIMEOUT = 408
_SAID = {
    "timeout": "the request was over its time limit (its own timeout, or the server's --request-timeout)",
    "queue_timeout": "the request waited for the server's whole --queue-timeout and did not begin",
}


def service_options(request: Request, form: GenerationForm, fair_share: str) -> dict[str, Any]:
    """The options of AsyncLLM.start that say how a request is to be served. Raises RequestError for a bad user."""
    return {"priority": form.priority or 0, "timeout": form.timeout, "tenant": _tenant(request, form, fair_share)}


def key_name(request: Request) -> str | None:
    """The name of the API key that the request came with; None where there are no keys."""
    name: str | None = getattr(request.state, "api_key_name", None)
    return name


def _tenant(request: Request, form: GenerationForm, fair_share: str) -> str:
    if fair_share == "key":
        return key_name(request) or ""
    if fair_share == "user":
        user = (form.model_extra or {}).get("user")
        if user is not None and not isinstance(user, str):
            raise RequestError(f"user must be text, got {user!r:.60}", param="user")
        return user or ""
    return ""


async def in_time(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """`outputs`, up to one that is over its time: what it has is passed on without a finish_reason, then RequestError.

    So a stream ends with its tokens and an error event, and a whole response is an error, never a cut answer that
    looks complete.
    """
    async with aclosing(outputs) as source:
        async for index, output in source:
            shown, error = within_time(output)
            if shown is not None:
                yield index, shown
            if error is not None:
                raise error


def within_time(output: RequestOutput) -> tuple[RequestOutput | None, RequestError | None]:
    """What is to be shown of an output, and the error that follows it where that is over its time."""
    for choice in output.outputs:
        if _is_over(choice):
            rest = [_unfinished(one) for one in output.outputs if one.text or one.token_ids]
            shown = msgspec.structs.replace(output, outputs=rest, finished=False) if rest else None
            return shown, _timed_out(str(choice.stop_reason))
    return output, None


def _is_over(choice: CompletionOutput) -> bool:
    return choice.finish_reason == "abort" and choice.stop_reason in _SAID


def _unfinished(choice: CompletionOutput) -> CompletionOutput:
    return msgspec.structs.replace(choice, finish_reason=None, stop_reason=None) if _is_over(choice) else choice


def _timed_out(reason: str) -> RequestError:
    queued = reason == "queue_timeout"
    return RequestError(
        _SAID[reason],
        status=REQUEST_TIMEOUT,
        type="timeout_error",
        param=None if queued else "timeout",
        code=reason if queued else "request_timeout",
        retry_after=1 if queued else None,
    )
