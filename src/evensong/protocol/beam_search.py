"""Beam search: what a user asks for and gets, under vLLM's names."""

from __future__ import annotations

import math

import msgspec

from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import Logprob

MAX_LENGTH_PENALTY = 64.0


class BeamSearchParams(msgspec.Struct, kw_only=False):
    """Settings of one search: the `beam_width` best continuations of up to `max_tokens` tokens.

    A sequence ranks by its log-probability, divided by its length (prompt and output, without EOS) to the power of
    `length_penalty`. `temperature` is vLLM's and changes nothing: log-probabilities are the model's own.
    `include_stop_str_in_output` shows EOS in the text. Raises RequestError naming a value that can never be right.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise RequestError(f"{name} must be an integer of at least 1, got {value!r:.60}", param=name)
        for name, low, high in (
            ("temperature", 0.0, 1e9),
            ("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        ):
            number = getattr(self, name)
            fits = isinstance(number, (int, float)) and not isinstance(number, bool) and low <= number <= high
            if not fits or not math.isfinite(number):
                raise RequestError(f"{name} must be a number in [{low:g}, {high:g}], got {number!r:.60}", param=name)


class BeamSearchSequence(msgspec.Struct):
    """One of the best. `tokens` and `text` begin with the prompt; `logprobs` has one entry a token of output.

    An entry holds the token itself first, then the best others at its place.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct):
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]
