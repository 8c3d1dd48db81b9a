"""What a user gets: RequestOutput and its choices, under vLLM's attribute names."""

from __future__ import annotations

import msgspec

from evensong.protocol.sampling_params import SamplingParams


class Logprob(msgspec.Struct):
    """One token's raw log-probability, its rank among all tokens (from 1), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
# One entry a token of the prompt; the first has none.
PromptLogprobs = list[dict[int, Logprob] | None]


class CompletionOutput(msgspec.Struct):
    """One choice. `seed` reproduces it alone: a request with n=1 and this seed gives this choice."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None

    def finished(self) -> bool:
        """True once the choice has its last token."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """A request's state after new tokens: whole, or only what is new (SamplingParams.output_kind).

    `prompt_logprobs`, where asked for, are complete from the first output on; of outputs that carry what is new, only
    the first has them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    params: SamplingParams | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: PromptLogprobs | None = None


class RequestMetrics(msgspec.Struct):
    """Times of one request, in seconds of the wall clock; None where it has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
