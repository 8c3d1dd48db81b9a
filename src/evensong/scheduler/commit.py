"""commit: applies a step's sampled tokens to a request, decides whether it ends, and makes its output."""

from __future__ import annotations

from evensong.protocol.errors import ErrorBody
from evensong.protocol.output import EngineCoreOutput, FinishReason, PromptScores, TokenLogprobs
from evensong.protocol.step import ModelOutput
from evensong.scheduler.repetition import repeats
from evensong.scheduler.request import Request

# The stop_reason of a request whose masks (allowed_token_ids, bad_words, min_tokens) left no token to sample.
NO_TOKEN_ALLOWED = "no_token_allowed"
# The stop_reason of a request whose output repeats itself as repetition_detection says.
REPETITION_DETECTED = "repetition_detected"


def commit_tokens(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None, max_model_len: int
) -> EngineCoreOutput:
    """Appends tokens up to the one that ends the request; later ones are dropped. The status is left to the caller."""
    kept = 0
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    for token_id in token_ids:
        request.token_ids.append(token_id)
        if request.grammar is not None:
            request.grammar.accept(token_id)
        kept += 1
        reason, stop_reason = stop_check(request, token_id, max_model_len)
        if reason is not None:
            break
    start = request.num_sent_tokens
    request.num_sent_tokens += kept
    first = start == len(request.source.output_token_ids)
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.source.attempt,
        start=start,
        new_token_ids=token_ids[:kept],
        new_logprobs=None if logprobs is None else logprobs[:kept],
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.first_cached_tokens or 0,
        scheduled_time=request.first_scheduled_time if first else 0.0,
    )


def stop_check(request: Request, token_id: int, max_model_len: int) -> tuple[FinishReason | None, int | str | None]:
    """Whether `token_id`, the request's newest token, ends it, and the stop_reason that the API reports."""
    params = request.source.params
    num_output_tokens = request.num_output_tokens
    if num_output_tokens >= params.min_tokens:
        if not params.ignore_eos and token_id in request.source.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in request.stop_ids:
            return FinishReason.STOP, token_id
        repetition = params.repetition_detection
        if repetition is not None and repeats(request.token_ids, num_output_tokens, repetition):
            return FinishReason.STOP, REPETITION_DETECTED
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH, None
    if request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None, None


def commit_prompt_scores(request: Request, scores: PromptScores) -> EngineCoreOutput:
    """Log-probabilities of part of the prompt go out as they are computed, each once."""
    request.num_prompt_logprobs_sent = scores.start + len(scores.positions) - 1
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.source.attempt,
        start=request.num_sent_tokens,
        new_token_ids=[],
        num_cached_tokens=request.first_cached_tokens or 0,
        prompt_scores=scores,
    )


def end_without_token(request: Request, output: ModelOutput) -> EngineCoreOutput | None:
    """The last output of a request that could not be sampled in a step; None for any other."""
    if request.grammar is not None and request.grammar.fault is not None:
        message = f"the grammar cannot be followed any further: {request.grammar.fault}"
        return final_output(request, FinishReason.ERROR, ErrorBody(message, 400, code="grammar_limit"))
    if request.request_id in output.errors:
        error = ErrorBody(output.errors[request.request_id], 500, "internal_error")
        return final_output(request, FinishReason.ERROR, error)
    if request.source.params.max_tokens == 0:
        # Only the prompt was to be scored; what its last position would go on with is dropped.
        return final_output(request, FinishReason.LENGTH)
    if request.request_id in output.exhausted:
        return final_output(request, FinishReason.STOP, stop_reason=NO_TOKEN_ALLOWED)
    return None


def final_output(
    request: Request, reason: FinishReason, error: ErrorBody | None = None, stop_reason: str | None = None
) -> EngineCoreOutput:
    """The last output of a request that ends without a token: aborted, failed, over its time, or out of choices."""
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.source.attempt,
        start=request.num_sent_tokens,
        new_token_ids=[],
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.first_cached_tokens or 0,
        error=error,
    )
