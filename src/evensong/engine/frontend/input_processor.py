"""InputProcessor: validates what a user sends, tokenizes it, and makes the requests that a core gets (spec F1)."""

from __future__ import annotations

import copy
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evensong.engine.frontend.bad_words import bad_word_token_ids, check_something_is_left
from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.protocol.errors import RequestError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_MASK = 2**64 - 1
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
# Most characters that a Unicode normalization joins into one; a tokenizer that normalizes sees a shorter text.
_NORMALIZED_CHARS = 4


@dataclass(frozen=True)
class ProcessedRequest:
    """One user request: its prompt, and one core request per choice."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[EngineCoreRequest]


class InputProcessor:
    """For one model. `resources` are what the core learned; `max_n` bounds the choices of a request.

    `seed` makes the seeds that are drawn for requests without one a fixed series.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        resources: Resources,
        *,
        eos_token_ids: Sequence[int],
        max_logprobs: int,
        max_n: int = 16384,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
        self.max_model_len = resources.max_model_len
        # Rows beyond the tokenizer's ids pad the embedding; no request may name them.
        self.num_token_ids = min(resources.vocab_size, tokenizer.vocab_size)
        self.eos_token_ids = list(eos_token_ids)
        self.max_logprobs = max_logprobs
        self.max_n = max_n
        self._random_bits = secrets.randbits if seed is None else random.Random(seed).getrandbits

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
    ) -> ProcessedRequest:
        """The core requests of one user request. Raises RequestError naming the field that cannot be served."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {params!r:.60}", param="sampling_params")
        # A copy, checked again: a user may have set a field of the original to anything since it was made.
        params = params.clone()
        self._resolve_params(params)
        check_text(request_id, "request_id")
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            cache_salt = prompt["cache_salt"]
        if cache_salt is not None:
            check_text(cache_salt, "cache_salt")
        text, token_ids = self.tokenize(prompt, add_special_tokens=add_special_tokens)
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise self._too_long(len(token_ids))
        if params.max_tokens is None or params.max_tokens > room:
            params.max_tokens = room
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens ({params.min_tokens}) does not fit: the prompt leaves room for {params.max_tokens} tokens",
                param="min_tokens",
            )
        if params.seed is None:
            params.seed = self._random_bits(64) - 2**63
        unique = f"{request_id}-{secrets.token_hex(4)}"
        arrival = time.time() if arrival_time is None else arrival_time
        children = []
        for index in range(params.n):
            child = copy.copy(params)  # checked already
            child.n, child.seed = 1, child_seed(params.seed, index)
            if index:
                child.prompt_logprobs = None  # the first choice computes them for all
            children.append(
                EngineCoreRequest(
                    request_id=f"{index}_{unique}" if params.n > 1 else unique,
                    prompt_token_ids=token_ids,
                    params=child,
                    arrival_time=arrival,
                    eos_token_ids=self.eos_token_ids,
                    cache_salt=cache_salt,
                )
            )
        return ProcessedRequest(text, token_ids, params, children)

    def _resolve_params(self, params: SamplingParams) -> None:
        """Sets what depends on the model. Raises RequestError for settings that it cannot serve."""
        if params.n > self.max_n:
            raise RequestError(f"n must be at most {self.max_n}, got {params.n}", param="n")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, name)) is not None and count > self.max_logprobs:
                raise RequestError(f"{name} must be at most {self.max_logprobs}, got {count}", param=name)
        self.check_token_ids(params.stop_token_ids or [], "stop_token_ids")
        self.check_token_ids(list(params.logit_bias or ()), "logit_bias")
        if params.allowed_token_ids is not None:
            self.check_token_ids(params.allowed_token_ids, "allowed_token_ids")
            params.allowed_token_ids = sorted(set(params.allowed_token_ids))
        words = params.bad_words
        params.bad_words_token_ids = bad_word_token_ids(self.tokenizer, words) if words else None
        check_something_is_left(params, self.eos_token_ids)

    def check_token_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises RequestError when a token id is not one of the vocabulary's."""
        # Only a list that holds a mistake is walked through in Python.
        if set(map(type, token_ids)) <= {int} and (
            not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.num_token_ids
        ):
            return
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(f"{field} holds {token_id!r:.40}, which is not a token id", param=field)
            if not 0 <= token_id < self.num_token_ids:
                shown = token_id if abs(token_id) < 2**80 else "a number of over 80 bits"
                raise RequestError(
                    f"{field} holds {shown}; token ids of this model are 0 to {self.num_token_ids - 1}", param=field
                )

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        """Text (None for token prompts) and token ids of a prompt in any of its forms."""
        prompt = _unwrap(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, str):
            return prompt, self.encode(prompt, add_special_tokens=add_special_tokens)
        if not isinstance(prompt, (list, tuple)):
            raise RequestError("a prompt must be text or a list of token ids", param="prompt")
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise self._too_long(len(prompt))
        self.check_token_ids(prompt, "prompt")
        return None, list(prompt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text that is a prompt: not empty, and short enough to be worth tokenizing."""
        if not text:
            raise RequestError("the prompt is empty", param="prompt")
        # No token covers more characters than the longest of the vocabulary, so a text this long cannot fit.
        most = self.max_model_len * self.tokenizer.max_token_chars
        if self.tokenizer.backend.normalizer is not None:
            most *= _NORMALIZED_CHARS
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, which is more than max_model_len {self.max_model_len} tokens "
                "can hold",
                param="prompt",
                code="context_length_exceeded",
            )
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt holds no token", param="prompt")
        return token_ids

    def _too_long(self, num_tokens: int) -> RequestError:
        return RequestError(
            f"the prompt has {num_tokens} tokens; with at least one token of output that is more than "
            f"max_model_len {self.max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )


def check_text(value: object, field: str) -> None:
    """Raises RequestError for what is not text, or holds a lone surrogate, which no message can carry."""
    if not isinstance(value, str):
        raise RequestError(f"{field} must be text, got {value!r:.60}", param=field)
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise RequestError(f"{field} holds a lone surrogate, which UTF-8 cannot hold", param=field)


def child_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the seed itself for the first, splitmix64 (Steele et al., 2014) for the others."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def _unwrap(prompt: Mapping[str, Any]) -> Any:
    """vLLM's dict prompts: {"prompt_token_ids": [...]} or {"prompt": "..."}."""
    unknown = set(prompt) - _PROMPT_KEYS
    if unknown:
        raise RequestError(f"a prompt dict cannot hold {sorted(map(str, unknown))[0]!r:.60}", param="prompt")
    if prompt.get("prompt_token_ids") is not None:
        return prompt["prompt_token_ids"]
    if isinstance(prompt.get("prompt"), str):
        return str(prompt["prompt"])
    raise RequestError("a prompt dict must hold 'prompt' (text) or 'prompt_token_ids'", param="prompt")
