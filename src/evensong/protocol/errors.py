"""The whole tree of errors that can reach a user, and the form in which one crosses a process line.

EvensongError
├─ RequestError            one request is refused (a ValueError; carries the HTTP status)
├─ ConfigError             a model, flag or setting cannot be used (a ValueError; exit code 2)
├─ EngineStartError        the engine could not start (exit code 1)
├─ EngineDeadError         the engine core died; nothing that waits on it will be answered
└─ UtilityError            a control verb failed in the core; the engine lives on
"""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The wire form of a refusal: what an OpenAI error body holds, and its HTTP status."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


class EvensongError(Exception):
    """Base of every error that evensong raises on purpose."""


class RequestError(EvensongError, ValueError):
    """One request cannot be served as it was sent; nothing else is affected.

    `status` is the HTTP status, `param` the offending field, `retry_after` is in seconds. `request_id` is set where
    one of several requests failed.
    """

    request_id: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> ErrorBody:
        """The form that crosses a process line."""
        return ErrorBody(self.message, self.status, self.type, self.param, self.code, self.retry_after)

    @classmethod
    def from_body(cls, body: ErrorBody) -> RequestError:
        """The error that `body` describes, to be raised on the caller's side."""
        return cls(
            body.message,
            status=body.status,
            type=body.type,
            param=body.param,
            code=body.code,
            retry_after=body.retry_after,
        )


class ConfigError(EvensongError, ValueError):
    """A setting, model or flag that cannot be used; the message is one line for a person."""


class EngineStartError(EvensongError, RuntimeError):
    """The engine did not come up; the message says which process, in which state, and why."""


class EngineDeadError(EvensongError, RuntimeError):
    """The engine core died. Raised by every waiter: streams, pending calls and later requests."""


class UtilityError(EvensongError, RuntimeError):
    """A control verb failed where it acts; the engine lives on."""
