"""Admission: which requests can ever run, and which must not wait now. Everything is refused before it is queued."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable

from evensong.protocol.errors import RequestError
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.queue import WaitingQueue
from evensong.scheduler.request import Request

# Starts that the pace is measured over, and the longest time that a client is asked to stay away.
PACE_STARTS = 32
MAX_RETRY_SECONDS = 120


class Pace:
    """How fast waiting requests have got slots lately: what a refused client is told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=PACE_STARTS)

    def started(self, others_wait: bool) -> None:
        """A waiting request got a slot; where nobody else waits the measure begins anew: idle time is not slowness."""
        if others_wait:
            self._starts.append(self._clock())
        else:
            self._starts.clear()

    def seconds_for(self, num_starts: int) -> int:
        """Whole seconds in which so many more may have started, in 1..MAX_RETRY_SECONDS."""
        if len(self._starts) < 2:
            return 1
        interval = (self._clock() - self._starts[0]) / (len(self._starts) - 1)
        return max(1, min(math.ceil(interval * num_starts), MAX_RETRY_SECONDS))


def check_queue(
    request: Request, waiting: WaitingQueue, num_free_slots: int, limits: SchedulerLimits, pace: Pace
) -> None:
    """Raises RequestError (429) where `request` would make the queue longer than `limits` allow.

    Those that the next step can take do not count as queued, however quickly they came. The first one behind them may
    always wait, however long its prompt: else nobody could ever send it to a busy server.
    """
    num_queued = len(waiting) - num_free_slots
    if num_queued >= limits.max_num_queued_reqs:
        raise _queue_full(f"{len(waiting)} requests wait already, the most allowed", pace.seconds_for(1))
    most = limits.max_num_queued_tokens
    if most is None or num_queued <= 0:
        return
    free = sum(first.num_tokens for first in itertools.islice(waiting, num_free_slots))
    queued = waiting.num_tokens - free
    excess = queued + request.num_tokens - most
    if excess > 0:
        raise _queue_full(
            f"{queued} tokens wait already; with the {request.num_tokens} of this prompt that is more than the {most} "
            "allowed",
            pace.seconds_for(math.ceil(excess * num_queued / queued)),
        )


def id_in_use(request_id: str) -> RequestError:
    """The refusal of a second request under an id that lives."""
    return RequestError(f"request id {request_id} is in use", status=409, param="request_id")


def _queue_full(message: str, retry_after: int) -> RequestError:
    return RequestError(message, status=429, type="rate_limit_error", code="queue_full", retry_after=retry_after)


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
        if request.num_output_tokens >= max(source.params.max_tokens, 1):
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
