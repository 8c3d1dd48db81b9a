"""EngineCoreRequest: one request as it travels from a front end to a core."""

from __future__ import annotations

import msgspec

from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import ReasoningSpec


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A resumable request (spec E2): admission with `output_token_ids` continues where those tokens end.

    `request_id` is unique among all requests that a core ever sees. `params` is resolved at first admission: `seed`
    and `max_tokens` are set, `n` is 1. `prompt_logprobs_delivered` counts the prompt tokens after the first whose
    log-probabilities the front end has, if it asks for them. `attempt` counts submissions of the same request; every
    output names it. `arrival_time` is in seconds of the wall clock. Of two priorities the lower number is more urgent.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    client_index: int = 0
    attempt: int = 0
    arrival_time: float = 0.0
    eos_token_ids: list[int] = []
    output_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str | None = None
    prompt_logprobs_delivered: int = 0
    # Seconds from its arrival in which it must be done; 0: no limit of its own.
    timeout: float = 0.0
    # Whose share of the service it takes (protocol/tenants.py); "" where nobody is told apart.
    tenant: str = ""
    # None where the output does not reason, or its constraints hold from the first token on.
    reasoning: ReasoningSpec | None = None
    # The same for all choices of a request, whose prompt is computed once; "" where there is one choice.
    group: str = ""


class AbortRequests(msgspec.Struct, array_like=True):
    """Ends requests by id; ids that are not known are ignored."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, array_like=True):
    """A call of a control verb (protocol/control.py); `args` is a msgpack map of its arguments."""

    call_id: int
    client_index: int
    verb: str
    args: msgspec.Raw
