"""What the APIs that are translated into a ChatForm have in common: settings of the engine, checks of bodies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from pydantic import Field, ValidationError

from evensong.entrypoints.http.body import refusal
from evensong.entrypoints.http.schemas import ChatForm, Form, Number
from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import INT64_MAX, INT64_MIN
from evensong.protocol.text import has_lone_surrogate

# Fields of EngineForm: a ChatForm has them under the same names.
PASSED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "cache_salt",
    "priority",
    "timeout",
    "chat_template_kwargs",
    "structured_outputs",
    "thinking_token_budget",
)


class EngineForm(Form):
    """Settings that completions and chat have too; most of them are evensong's additions to the API in question."""

    # Field -> values with which it asks for nothing; any other is refused.
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    advisory: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    stream: bool | None = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Any] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    timeout: Number | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    def unknown_fields(self) -> list[str]:
        """Names of fields that this server does not know. Raises RequestError for one that it cannot honour."""
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name in self.refused:
                if value not in self.refused[name]:
                    raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
            elif name not in self.advisory:
                unknown.append(name)
        return unknown

    def passed(self) -> dict[str, Any]:
        """The fields that a ChatForm has too, as far as they are set."""
        return {name: value for name in PASSED if (value := getattr(self, name)) is not None}


def chat_form(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatForm:
    """The form of `fields`. Raises RequestError, under the `names` that the fields have in the caller's API."""
    try:
        form = ChatForm.model_validate(fields)
        form.unknown_fields()
    except ValidationError as error:
        raise renamed(refusal(error), names) from error
    except RequestError as error:
        raise renamed(error, names) from error
    return form


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error about a ChatForm's field as one about the field that its caller sent."""
    head = (error.param or "").partition("[")[0].partition(".")[0]
    if head not in names:
        return error
    message = error.message.replace(head, names[head], 1) if error.message.startswith(head) else error.message
    body = msgspec.structs.replace(error.body(), message=message, param=names[head])
    return RequestError.from_body(body)


def check_values(value: Any, where: str) -> None:
    """Raises RequestError for what no JSON in UTF-8 can hold: a lone surrogate, a number that is not finite."""
    level = [value]
    while level:
        following: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if has_lone_surrogate(one):
                    raise RequestError(f"{where} holds a lone surrogate, which no UTF-8 can hold", param=where)
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise RequestError(f"{where} holds a number that is not finite", param=where)
            elif isinstance(one, Mapping):
                following += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                following += one
        level = following


def check_form(form: Form) -> None:
    """`check_values` for every field of a form. Raises RequestError naming the field."""
    for name in type(form).model_fields:
        value = getattr(form, name)
        check_values(value.model_dump() if isinstance(value, Form) else value, name)


def text_of(value: object, where: str) -> str:
    """A string. Raises RequestError for anything else."""
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string", param=where)
    return value


def object_at(value: object, where: str) -> dict[str, Any]:
    """An object. Raises RequestError for anything else."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object", param=where)
    return value
