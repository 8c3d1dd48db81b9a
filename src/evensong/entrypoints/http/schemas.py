"""Request forms of the HTTP API: fields that work, and those that are refused since they would not be honoured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from evensong.entrypoints.http.response_format import wanted_structure
from evensong.protocol.errors import RequestError
from evensong.protocol.extra_args import checked_extra_args
from evensong.protocol.sampling_params import INT64_MAX, INT64_MIN, RequestOutputKind, SamplingParams

T = TypeVar("T")
# Settings that list more tokens are checked in a thread.
INLINE_ITEMS = 4096
Number = float | int


class UpToTheFirst(FailFast):
    """FailFast that can stand in a union."""

    __hash__ = object.__hash__


# A list that is checked up to its first mistake: one complaint for each of a million items would fill the memory.
Items = Annotated[list[T], UpToTheFirst()]

# Field -> values with which it asks for nothing; any other is refused: the answer would not be what it asks for.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),  # in chat; completions have it
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "lora_request": (None,),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),  # in completions, as the two below; chats have them
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": (None,),
}
# What took the place of older fields.
REPLACED = {
    "function_call": "tool_choice",
    "functions": "tools",
    **{f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("choice", "grammar", "json", "regex")},
}
# Accepted and without effect on the answer.
ADVISORY = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
    | {"prompt_cache_retention", "verbosity", "stream_interval", "spaces_between_special_tokens"}
)


# Fields that mean to the engine what they mean here; None stands for one that the request does not set.
SAMPLING_FIELDS = (
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "logprob_token_ids",
    "repetition_detection",
    "thinking_token_budget",
)


class Form(BaseModel):
    """Base of all forms: strict types, finite numbers; unknown fields are kept to be named in a warning."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def unknown_fields(self) -> list[str]:
        """Names of fields that this server does not know. Raises RequestError for one that it cannot honour."""
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED:
                if value not in UNSUPPORTED[name]:
                    instead = f"; {REPLACED[name]} is" if name in REPLACED else ""
                    raise RequestError(f"{name} is not supported{instead}", param=name, code="unsupported_parameter")
            elif name not in ADVISORY:
                unknown.append(name)
        return unknown


class StreamOptions(Form):
    """stream_options of the OpenAI API."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationForm(Form):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | Items[str] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Any] | None = None  # SamplingParams checks the numbers, up to the first mistake
    stop_token_ids: Items[int] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    prompt_logprobs: int | None = None
    logprob_token_ids: Items[int] | None = None
    repetition_detection: dict[str, int] | None = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool | None = False
    length_penalty: Number | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    cache_salt: str | None = None
    priority: int | None = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    timeout: Number | None = None
    # The caller's own name for the request, in place of the X-Request-Id header.
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:\-]{1,128}$")

    @property
    def include_usage(self) -> bool:
        """A last chunk with the usage was asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def grammar_of(self) -> str | None:
        """The field that structured_outputs are made of, where that is another one."""
        return None if self.response_format is None else "response_format"

    def chunk_usage(self, usage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The usage field of a stream's chunk before the last: absent, null, or what has been used so far."""
        if not self.include_usage:
            return {}
        continuous = bool(self.stream_options and self.stream_options.continuous_usage_stats)
        return {"usage": usage() if continuous else None}

    async def resolve(self, defaults: Mapping[str, Any], **resolved: Any) -> SamplingParams:
        """`sampling_params`, in a thread where there is much to check."""
        lists = (self.logit_bias, self.stop_token_ids, self.allowed_token_ids)
        if sum(len(one) for one in lists if one is not None) <= INLINE_ITEMS:
            return self.sampling_params(defaults, **resolved)
        return await asyncio.to_thread(self.sampling_params, defaults, **resolved)

    def sampling_params(self, defaults: Mapping[str, Any], **resolved: Any) -> SamplingParams:
        """The engine's form of these settings: what the request says, else `defaults`, else the API's own.

        `resolved` are those that each route reads in its own way. Raises RequestError naming a field that cannot be.
        """
        if self.logprob_token_ids and resolved.get("logprobs") is None:
            raise RequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.vllm_xargs:
            given["extra_args"] = checked_extra_args(self.vllm_xargs, "vllm_xargs")
        if "structured_outputs" not in resolved:
            resolved["structured_outputs"] = wanted_structure(self.response_format, self.structured_outputs)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**{**defaults, **given, **resolved}, output_kind=kind)


class CompletionForm(GenerationForm):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = True

    @property
    def only_scores(self) -> bool:
        """The prompt is wanted back, or its log-probabilities, and nothing after it."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)

    def most_tokens(self, defaults: Mapping[str, Any]) -> int | None:
        """The engine's max_tokens: an explicit null asks for as many as fit; the API's own default is 16."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else defaults.get("max_tokens", 16)

    def num_prompt_logprobs(self) -> int | None:
        """The engine's prompt_logprobs setting: an echoed prompt has log-probabilities where the output has."""
        asked = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(asked, default=0 if self.only_scores else None)


class ChatForm(GenerationForm):
    """POST /v1/chat/completions."""

    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    reasoning_effort: str | None = None

    def most_tokens(self, defaults: Mapping[str, Any]) -> int | None:
        """The engine's max_tokens; where nothing is said, an answer may fill the context, as with the peers."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return defaults.get("max_tokens") if asked is None else asked

    def num_logprobs(self) -> int | None:
        """The engine's logprobs setting. Raises RequestError for a combination that says nothing."""
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs must not be negative, got {self.top_logprobs}", param="top_logprobs")
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class TokenizeForm(Form):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = False


class DetokenizeForm(Form):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]
