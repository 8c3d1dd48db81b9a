"""Admission: which requests can ever run, and which must not wait now. Everything is refused before it is queued."""

from __future__ import annotations

from evensong.protocol.errors import RequestError
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.request import Request


def check_fits(request: Request, limits: SchedulerLimits, pool_tokens: int | None) -> None:
    """Raises RequestError (400) with the figures for what can never run.

    `pool_tokens`: the longest request that the KV cache holds; None where any fits.
    """
    source = request.source
    if not source.prompt_token_ids:
        raise RequestError("the prompt holds no token", param="prompt")
    if request.num_tokens >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {request.num_tokens} tokens; with at least one token of output that is more than "
            f"max_model_len {limits.max_model_len}",
            param="prompt",
        )
    most = limits.max_model_len
    if source.params.max_tokens is not None:
        most = min(most, request.num_prompt_tokens + source.params.max_tokens)
        if request.num_output_tokens >= source.params.max_tokens:
            raise RequestError(
                f"the request comes with {request.num_output_tokens} tokens of output, and max_tokens is "
                f"{source.params.max_tokens}: there is nothing left to do",
                param="max_tokens",
            )
    # The last token of an output is never computed, so it needs no place.
    most -= 1
    if pool_tokens is not None and most > pool_tokens:
        raise RequestError(
            f"the prompt ({request.num_prompt_tokens} tokens) with its output needs room for {most} tokens; "
            f"the whole KV cache holds {pool_tokens}",
            param="prompt" if request.num_prompt_tokens > pool_tokens else "max_tokens",
        )
    # After a preemption the output so far is computed again with the prompt, in one piece here.
    if not limits.enable_chunked_prefill and most > limits.max_num_batched_tokens:
        raise RequestError(
            f"the prompt ({request.num_prompt_tokens} tokens) with its output may need {most} tokens in one step; "
            f"without chunked prefill a step holds at most {limits.max_num_batched_tokens}",
            param="prompt" if request.num_prompt_tokens > limits.max_num_batched_tokens else "max_tokens",
        )
