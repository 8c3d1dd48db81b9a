"""SamplingParams: how one request's tokens are chosen. Field names are vLLM's.

Checks here are those that need no model; the input processor checks the rest, and the core trusts what it decodes.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import msgspec

from evensong.protocol.errors import RequestError
from evensong.protocol.extra_args import checked_extra_args
from evensong.protocol.structured import StructuredOutputsParams, structured_outputs
from evensong.protocol.text import has_lone_surrogate

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# Divided by less than this, any two logits that differ lie further apart than noise reaches: only exact ties, which
# bfloat16 products make often, would be left to it.
GREEDY_BELOW = 1e-9
MAX_STOP_STRINGS = 128
MAX_BAD_WORDS = 128
# Each is tokenized twice.
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 256
MAX_TOKEN_ID = 2**31 - 1


class RequestOutputKind(IntEnum):
    """Which part of the output so far each RequestOutput carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """Ends an output whose last tokens are one pattern of min to max_pattern_size tokens, min_count times in a row.

    Raises RequestError. A `max_pattern_size` of 0 detects nothing.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        _integer("repetition_detection", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        _integer("repetition_detection", self.min_pattern_size, 0, self.max_pattern_size)
        _integer("repetition_detection", self.min_count, 2 if self.max_pattern_size else 0, MAX_TOKEN_ID)


class SamplingParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """Sampling settings of one request.

    Raises RequestError naming the field when a value can never be right. `temperature == 0` is greedy.
    `logprobs=k` returns the sampled token's raw log-probability and the k best, `prompt_logprobs=k` the same for each
    token of the prompt but the first; `truncate_prompt_tokens=k` keeps the last k tokens of the prompt, -1 as many as
    leave room for max_tokens; `seed=None` draws one, which the response reports. `max_tokens=None` means as many as the
    context length allows, 0 (with `prompt_logprobs` only) that nothing is generated. Only `allowed_token_ids` are
    sampled where they are given, and no token that would complete one of `bad_words`. `logprob_token_ids` get a
    log-probability at each position, beside the sampled token and the best ones. `skip_reading_prefix_cache=True`
    computes the whole prompt. `structured_outputs` says what the output must look like. `thinking_token_budget=k` lets
    a model reason for at most k tokens, where the server knows how its reasoning ends. `extra_args` are what the
    engine's logits processors are told (sampling/processor.py).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    # Set by the input processor from `bad_words`, whatever stood there.
    bad_words_token_ids: list[list[int]] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    # vLLM's; advisory: no tokenizer here puts spaces between special tokens.
    spaces_between_special_tokens: bool = True
    logprob_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop = _texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS)
        self.bad_words = _texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words or ():
            if len(word) > MAX_BAD_WORD_CHARS or word.isspace():
                fault = "a blank word" if word.isspace() else f"a word of over {MAX_BAD_WORD_CHARS} characters"
                raise RequestError(f"bad_words holds {fault}", param="bad_words")
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids == []:
            raise RequestError("allowed_token_ids is empty: no token could be produced", param="allowed_token_ids")
        self.logit_bias = _logit_bias(self.logit_bias)
        self.logprob_token_ids = _token_ids("logprob_token_ids", self.logprob_token_ids) or None
        self.repetition_detection = _repetition_detection(self.repetition_detection)
        self.structured_outputs = structured_outputs(self.structured_outputs)
        self.extra_args = checked_extra_args(self.extra_args)
        self._check_numbers()
        self._check_lengths()

    @property
    def greedy(self) -> bool:
        """True where no noise is added: the best token, lowest id on a tie."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, empty when there are none."""
        return list(self.stop) if isinstance(self.stop, list) else []

    @property
    def num_logprobs(self) -> int | None:
        """How many best tokens have a log-probability at each position; None where no token has."""
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs

    @property
    def num_items(self) -> int:
        """How many tokens and words the settings list: what checking them takes."""
        lists = (self.logit_bias, self.stop_token_ids, self.allowed_token_ids, self.bad_words)
        return sum(len(one) for one in lists if one is not None)

    def clone(self) -> SamplingParams:
        """A copy that can be changed without touching this one."""
        return msgspec.structs.replace(self)

    def _check_numbers(self) -> None:
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        # vLLM stops at 2 over HTTP; any finite temperature has a defined result here.
        self.temperature = _number("temperature", self.temperature, 0.0, 1e9)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be in (0, 1], got 0.0", param="top_p")
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = _integer("top_k", self.top_k, -1, INT64_MAX)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, INT64_MIN, INT64_MAX)

    def _check_lengths(self) -> None:
        _integer("n", self.n, 1, INT64_MAX)
        if self.max_tokens is not None:
            # Scoring a prompt needs no output; anything else would be a request for nothing.
            _integer("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, INT64_MAX)
        _integer("min_tokens", self.min_tokens, 0, INT64_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, INT64_MAX)
            if self.truncate_prompt_tokens == 0:
                raise RequestError(
                    "truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens"
                )
        for name in ("logprobs", "prompt_logprobs", "thinking_token_budget"):
            if (count := getattr(self, name)) is not None:
                _integer(name, count, 0, INT64_MAX)
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"logprob_token_ids must hold at most {MAX_LOGPROB_TOKEN_IDS} token ids", param="logprob_token_ids"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")


def _number(name: str, value: object, low: float, high: float) -> float:
    """`value` as a finite float within [low, high], else RequestError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {value!r:.60}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise RequestError(f"{name} must be a finite number in [{low:g}, {high:g}], got {number!r}", param=name)
    return number


def _integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int within [low, high], else RequestError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r:.60}", param=name)
    if not low <= value <= high:
        shown = value if abs(value) < 2**80 else "a number of over 80 bits"
        raise RequestError(f"{name} must be in [{low}, {high}], got {shown}", param=name)
    return value


def _token_ids(name: str, value: object) -> list[int] | None:
    """`value` as a list of token ids, whatever model they are for."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    # Lists may be as long as a vocabulary: only one that holds a mistake is walked through in Python.
    if not set(map(type, value)) <= {int} or (value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID):
        for token_id in value:
            _integer(name, token_id, 0, MAX_TOKEN_ID)
    return list(value)


def _repetition_detection(value: object) -> RepetitionDetectionParams | None:
    """`value` checked, whether it is the engine's own form or a JSON object."""
    if value is None or isinstance(value, RepetitionDetectionParams):
        return None if value is None else msgspec.structs.replace(value)
    known = set(RepetitionDetectionParams.__struct_fields__)
    if not isinstance(value, dict) or not set(value) <= known:
        raise RequestError(
            f"repetition_detection must hold {', '.join(sorted(known))} and nothing else", param="repetition_detection"
        )
    return RepetitionDetectionParams(**value)


def _texts(name: str, value: object, most: int) -> list[str] | None:
    """`value` as a list of at most `most` texts, none of them empty; None for an empty list."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value[: most + 1]):
        raise RequestError(f"{name} must be a list of strings", param=name)
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} strings, at most {most} are allowed", param=name)
    for item in value:
        if not item:
            raise RequestError(f"{name} must not hold an empty string", param=name)
        if has_lone_surrogate(item):
            raise RequestError(f"{name} holds a lone surrogate, which no text can contain", param=name)
    return list(value) or None


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token_id = key
        if isinstance(key, str):
            digits = key.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
                raise RequestError(f"logit_bias has a key that is not a token id: {key!r:.60}", param="logit_bias")
            token_id = int(key)
        _integer("logit_bias", token_id, 0, MAX_TOKEN_ID)
        bias[token_id] = _number("logit_bias", amount, -100.0, 100.0)
    return bias or None
