"""InputProcessor: validates what a user sends, tokenizes it, and makes the requests that a core gets (spec F1)."""

from __future__ import annotations

import copy
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.engine.frontend.param_rules import ParamRules
from evensong.engine.frontend.reasoning import Phase, ReasoningFormat
from evensong.engine.frontend.service import check_priority, check_timeout
from evensong.protocol.errors import RequestError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import ReasoningSpec
from evensong.protocol.tenants import tenant_id
from evensong.protocol.text import has_lone_surrogate
from evensong.sources.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_MASK = 2**64 - 1
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
# Most characters that a Unicode normalization joins into one; a tokenizer that normalizes sees a shorter text.
_NORMALIZED_CHARS = 4
# Longest text that is tokenized though most of it will be cut off: less than a second of one core, in a thread.
_TRUNCATABLE_CHARS = 300_000
# Enough of a prompt's end to show a marker of reasoning.
_END_TOKENS = 64


@dataclass(frozen=True)
class ProcessedRequest:
    """One user request: its prompt, and one core request per choice."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[EngineCoreRequest]
    # Special tokens that have a text though the others are left out.
    shown_token_ids: frozenset[int] = frozenset()


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
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
        self.max_model_len = resources.max_model_len
        self.eos_token_ids = list(eos_token_ids)
        # Rows beyond the tokenizer's ids pad the embedding; no request may name them.
        num_token_ids = min(resources.vocab_size, tokenizer.vocab_size)
        self.rules = ParamRules(tokenizer, num_token_ids, self.eos_token_ids, max_logprobs, max_n)
        self._reasoning = reasoning
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
        priority: int = 0,
        timeout: float | None = None,
        tenant: str = "",
        shown_token_ids: frozenset[int] = frozenset(),
        phase: Phase | None = None,
    ) -> ProcessedRequest:
        """The core requests of one user request. Raises RequestError naming the field that cannot be served.

        `phase`: where its reasoning stands, if the caller knows better than the prompt's end.
        """
        params = self.rules.resolve(params)
        check_text(request_id, "request_id")
        check_priority(priority)
        check_timeout(timeout)
        check_text(tenant, "tenant")
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            cache_salt = prompt["cache_salt"]
        if cache_salt is not None:
            check_text(cache_salt, "cache_salt")
        keep = self._tokens_to_keep(params)
        text, token_ids = self.tokenize(prompt, add_special_tokens=add_special_tokens, keep=keep)
        self._fit_lengths(params, len(token_ids))
        if params.seed is None:
            params.seed = self._random_bits(64) - 2**63
        reasoning = self._reasoning_of(params, phase, text, token_ids)
        unique = f"{request_id}-{secrets.token_hex(4)}"
        arrival = time.time() if arrival_time is None else arrival_time
        children = [
            EngineCoreRequest(
                request_id=f"{index}_{unique}" if params.n > 1 else unique,
                prompt_token_ids=token_ids,
                params=_params_of_choice(params, index),
                arrival_time=arrival,
                eos_token_ids=self.eos_token_ids,
                priority=priority,
                cache_salt=cache_salt,
                timeout=timeout or 0.0,
                tenant=tenant_id(tenant),
                reasoning=reasoning,
                group=unique if params.n > 1 else "",
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(text, token_ids, params, children, shown_token_ids)

    def _reasoning_of(
        self, params: SamplingParams, phase: Phase | None, text: str | None, token_ids: list[int]
    ) -> ReasoningSpec | None:
        """How the request's reasoning ends; None where nothing depends on that."""
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return None
        if self._reasoning is None:
            if params.thinking_token_budget is not None:
                raise RequestError(
                    "thinking_token_budget needs a server that knows how its model reasons (--reasoning-parser)",
                    param="thinking_token_budget",
                )
            return None
        if phase is None:
            phase = self._reasoning.phase(text or self.tokenizer.decode(token_ids[-_END_TOKENS:], False))
        spec = self._reasoning.spec(phase, self.tokenizer)
        if spec is not None and len(spec.start_token_ids) > 1 and params.structured_outputs is not None:
            # Its first token may begin what the grammar wants too ("<" of <tool_call>), and a vocabulary without a
            # token for the marker is that of a model that does not reason.
            return None
        return spec

    def _tokens_to_keep(self, params: SamplingParams) -> int | None:
        """How many tokens of a longer prompt are kept, its last ones; None where none may be cut off."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return None
        if keep > self.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be at most max_model_len {self.max_model_len}, got {keep}",
                param="truncate_prompt_tokens",
            )
        return keep if keep > 0 else max(self.max_model_len - (params.max_tokens or 1), 1)

    def _fit_lengths(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Cuts max_tokens to the room that the prompt leaves; raises RequestError where that is too little."""
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise self._too_long(num_prompt_tokens)
        if params.max_tokens is None or params.max_tokens > room:
            params.max_tokens = room
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens ({params.min_tokens}) does not fit: the prompt leaves room for {params.max_tokens} tokens",
                param="min_tokens",
            )

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, keep: int | None = None
    ) -> tuple[str | None, list[int]]:
        """Text (None for token prompts) and token ids of a prompt in any of its forms; at most its last `keep`."""
        prompt = _unwrap(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, str):
            least = 0 if keep is None else _TRUNCATABLE_CHARS
            token_ids = self.encode(prompt, add_special_tokens=add_special_tokens, least_chars=least)
            return prompt, token_ids if keep is None else token_ids[-keep:]
        if not isinstance(prompt, (list, tuple)):
            raise RequestError("a prompt must be text or a list of token ids", param="prompt")
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        prompt = prompt if keep is None else prompt[-keep:]
        if len(prompt) >= self.max_model_len:
            raise self._too_long(len(prompt))
        self.check_token_ids(prompt, "prompt")
        return None, list(prompt)

    @property
    def num_token_ids(self) -> int:
        """Token ids of the model run from 0 to one less."""
        return self.rules.num_token_ids

    def check_token_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises RequestError when a token id is not one of the vocabulary's."""
        self.rules.check_token_ids(token_ids, field)

    def encode(self, text: str, *, add_special_tokens: bool = True, least_chars: int = 0) -> list[int]:
        """Token ids of a text that is a prompt: not empty, and short enough to be worth tokenizing.

        A text of up to `least_chars` characters is tokenized though it may not fit.
        """
        if not text:
            raise RequestError("the prompt is empty", param="prompt")
        # No token covers more characters than the longest of the vocabulary, so a text this long cannot fit.
        most = self.max_model_len * self.tokenizer.max_token_chars
        if self.tokenizer.backend.normalizer is not None:
            most *= _NORMALIZED_CHARS
        if len(text) > max(most, least_chars):
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
    if has_lone_surrogate(value):
        raise RequestError(f"{field} holds a lone surrogate, which UTF-8 cannot hold", param=field)


def _params_of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The settings of one of n choices."""
    own = copy.copy(params)  # without the checks, which the whole has passed
    own.n, own.seed = 1, child_seed(params.seed or 0, index)
    if index:
        own.prompt_logprobs = None  # the first choice computes them for all
    return own


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
