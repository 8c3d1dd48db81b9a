"""Request: one request as the scheduler knows it. Only the scheduler and commit change it."""

from __future__ import annotations

import time
from enum import Enum, auto

from evensong.protocol.request import EngineCoreRequest


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Tokens known and tokens computed; there is no prefill or decode phase (spec G1)."""

    __slots__ = (
        "block_hashes",
        "first_cached_tokens",
        "first_scheduled_time",
        "first_step_id",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_sent_tokens",
        "request_id",
        "source",
        "status",
        "stop_ids",
        "steps_waited",
        "token_ids",
    )

    def __init__(self, source: EngineCoreRequest) -> None:
        self.source = source
        self.request_id = source.request_id
        self.token_ids = source.prompt_token_ids + source.output_token_ids
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.num_computed_tokens = 0
        # Output tokens that the front end has: what this attempt started from, and what was sent since.
        self.num_sent_tokens = len(source.output_token_ids)
        self.status = RequestStatus.WAITING
        self.block_hashes: list[bytes] = []
        self.stop_ids = frozenset(source.params.stop_token_ids or ())
        # Prefix-cache hit of the first admission; None until then. Preemption does not change what is reported.
        self.first_cached_tokens: int | None = None
        # Wall clock, as the front end's arrival times.
        self.first_scheduled_time = 0.0
        # The step in which it got the slot that it holds; results of earlier steps are not for it.
        self.first_step_id = 0
        self.steps_waited = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def resumed(self) -> bool:
        """True for a request that was admitted before: it skips the queue limit and goes ahead of new ones."""
        return self.source.attempt > 0 or bool(self.source.output_token_ids)

    @property
    def begun(self) -> bool:
        """True from its first slot on."""
        return self.first_cached_tokens is not None

    def run(self, num_cached_tokens: int, step_id: int) -> None:
        """It has a slot from step `step_id` on, and its first `num_cached_tokens` tokens are computed already."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = num_cached_tokens
        self.first_step_id = step_id
        if self.first_cached_tokens is None:
            self.first_cached_tokens = num_cached_tokens
            self.first_scheduled_time = time.time()
