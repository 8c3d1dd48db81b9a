"""What a core sends back: admissions, tokens, utility replies, stats."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from evensong.protocol.errors import ErrorBody
from evensong.protocol.stats import SchedulerStats


class FinishReason(IntEnum):
    """Why a request ended; `str()` gives the name that the API shows."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Raw log-probabilities at one position: the sampled token first, then the best ones in order.

    `rank` is the sampled token's rank among all tokens, from 1. The last `num_asked` are of tokens that were asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    num_asked: int = 0


class PromptScores(msgspec.Struct, array_like=True, gc=False):
    """Raw log-probabilities of part of a prompt: `positions[i]` is of prompt token `start + i`, which counts from 0.

    The first token follows nothing and has none, so the first part starts at 1.
    """

    start: int
    positions: list[TokenLogprobs]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request. `start` is the index, among its output tokens, of the first one here.

    `scheduled_time`, with its first tokens: when it first got a slot, in seconds of the wall clock.
    """

    request_id: str
    attempt: int
    start: int
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: ErrorBody | None = None
    scheduled_time: float = 0.0
    prompt_scores: PromptScores | None = None


class Admission(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The answer to an ADD, before any token: ADMITTED when `refusal` is None, else REFUSED.

    `num_cached_tokens` is what the prefix cache held for it at that moment.
    """

    request_id: str
    attempt: int
    num_cached_tokens: int = 0
    refusal: ErrorBody | None = None


class UtilityReply(msgspec.Struct, array_like=True, omit_defaults=True):
    """Result of a control verb: a msgpack value, or why it failed. `refusal`: the caller's mistake."""

    call_id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: str | None = None
    refusal: ErrorBody | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message from a core to one client: what a step, or an admission, produced for it."""

    engine_index: int = 0
    incarnation: int = 0
    outputs: list[EngineCoreOutput] = []
    admissions: list[Admission] = []
    utility: UtilityReply | None = None
    stats: SchedulerStats | None = None
    timestamp: float = 0.0


class EngineDeath(msgspec.Struct, array_like=True):
    """Follows ENGINE_CORE_DEAD: which core died and why."""

    engine_index: int
    incarnation: int
    reason: str
