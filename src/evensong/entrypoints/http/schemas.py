"""Request forms of the HTTP API: fields that work, and those that are refused since they would not be honoured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import INT64_MAX, INT64_MIN, RequestOutputKind, SamplingParams

T = TypeVar("T")
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
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1.0),
    "lora_request": (None,),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
# Accepted and without effect on the answer.
ADVISORY = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
    | {"prompt_cache_retention", "verbosity", "stream_interval", "spaces_between_special_tokens", "priority"}
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
                    raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
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
    n: int | None = 1
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | Items[str] | None = None
    temperature: Number | None = 1.0
    top_p: Number | None = 1.0
    top_k: int | None = 0
    min_p: Number | None = 0.0
    presence_penalty: Number | None = 0.0
    frequency_penalty: Number | None = 0.0
    repetition_penalty: Number | None = 1.0
    logit_bias: dict[str, Any] | None = None  # SamplingParams checks the numbers, up to the first mistake
    stop_token_ids: Items[int] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def include_usage(self) -> bool:
        """A last chunk with the usage was asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def chunk_usage(self, usage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The usage field of a stream's chunk before the last: absent, null, or what has been used so far."""
        if not self.include_usage:
            return {}
        continuous = bool(self.stream_options and self.stream_options.continuous_usage_stats)
        return {"usage": usage() if continuous else None}

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's form of these settings. Raises RequestError naming a field that cannot be."""
        return SamplingParams(
            n=1 if self.n is None else self.n,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # keys are digits in JSON; SamplingParams reads them
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )


class CompletionForm(GenerationForm):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    add_special_tokens: bool | None = True


class ChatForm(GenerationForm):
    """POST /v1/chat/completions."""

    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = True

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
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeForm(Form):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]
