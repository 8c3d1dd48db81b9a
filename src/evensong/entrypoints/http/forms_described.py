"""Forms of responses, for the OpenAPI description alone: responses are written by hand, and may hold more fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(BaseModel):
    """The one form in which this server says no."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Output tokens that are reasoning, its markers included."""

    reasoning_tokens: int


class UsageForm(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None = None


class Ending(BaseModel):
    """How a choice ended, and the seed that gives it again."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "error"] | str
    stop_reason: int | str | None
    seed: int | None


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None


class TokenLogprob(BaseModel):
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TokenLogprob):
    """A token of an answer, with the best at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatToken] | None


class CalledFunction(BaseModel):
    """A tool's name, and its arguments: the text of a JSON object, which max_tokens may have cut."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """The assistant's message; `tool_calls` and `reasoning` stand there where there are any."""

    role: str
    content: str | None
    tool_calls: list[ToolCall] = []
    reasoning: str = ""
    reasoning_content: str = ""


class ChatChoice(Ending):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class Answer(BaseModel):
    """What every answer to a generation request has."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: UsageForm


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """The text of token ids."""

    prompt: str


class VersionAnswer(BaseModel):
    """The version, and what the bits of an answer depend on."""

    version: str
    fingerprint: str | None = None
    fingerprint_parts: dict[str, Any] = {}
    kernels: dict[str, str] = {}
    deterministic: bool | None = None
