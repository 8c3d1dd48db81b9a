"""Request: one request as the scheduler knows it. Only the scheduler and commit change it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto

from evensong.protocol.request import EngineCoreRequest
from evensong.scheduler.grammar.state import RequestGrammar


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Rank:
    """Where a request stands among others (scheduler/policy.py); lower is sooner."""

    __slots__ = (
        "arrival",
        "displaced_step",
        "displaced_tokens",
        "priority",
        "steps_behind",
        "urgency",
        "waiting_since",
    )

    def __init__(self, priority: int) -> None:
        # What was asked for, and where it stands.
        self.priority = self.urgency = priority
        # Its number among all arrivals, and the step since which it waits.
        self.arrival = 0
        self.waiting_since = 0
        # Steps that it let another compute the prefix that both have.
        self.steps_behind = 0
        # When it was last displaced for a more urgent one, and the tokens that it had then.
        self.displaced_step: int | None = None
        self.displaced_tokens = 0


class Seat:
    """A request's time in a slot: since which step, whose results are the first ones for it, and what is in flight."""

    __slots__ = ("first_step_id", "last_sampled_step", "num_unknown_tokens")

    def __init__(self, step_id: int) -> None:
        self.first_step_id = step_id
        # Tokens that steps in flight sample, and the last such step: no result has named them yet.
        self.num_unknown_tokens = 0
        self.last_sampled_step = 0


class Request:
    """Tokens known and tokens computed; there is no prefill or decode phase (spec G1)."""

    __slots__ = (
        "block_hashes",
        "first_cached_tokens",
        "first_scheduled_time",
        "grammar",
        "num_computed_tokens",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_sent_tokens",
        "rank",
        "request_id",
        "seat",
        "source",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, source: EngineCoreRequest, *, priority: int = 0) -> None:
        self.source = source
        self.request_id = source.request_id
        self.token_ids = source.prompt_token_ids + source.output_token_ids
        self.num_prompt_tokens = len(source.prompt_token_ids)
        # Those of steps in flight count: they were planned.
        self.num_computed_tokens = 0
        # Output tokens that the front end has: what this attempt started from, and what was sent since.
        self.num_sent_tokens = len(source.output_token_ids)
        self.num_prompt_logprobs_sent = source.prompt_logprobs_delivered
        self.status = RequestStatus.WAITING
        # What its next token may be; None: anything.
        self.grammar: RequestGrammar | None = None
        self.block_hashes: list[bytes] = []
        self.stop_ids = frozenset(source.params.stop_token_ids or ())
        # Prefix-cache hit of the first admission; None until then. Preemption does not change what is reported.
        self.first_cached_tokens: int | None = None
        # Wall clock, as the front end's arrival times.
        self.first_scheduled_time = 0.0
        self.seat = Seat(0)
        self.rank = Rank(priority)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unknown_tokens(self) -> int:
        """Tokens that steps in flight sample."""
        return self.seat.num_unknown_tokens

    @property
    def first_step_id(self) -> int:
        """The step in which it got the slot that it holds."""
        return self.seat.first_step_id

    @property
    def reads_cache(self) -> bool:
        """Whether it may use what others computed.

        Not while log-probabilities of its prompt are owed: only computing the prompt gives them.
        """
        if self.source.params.skip_reading_prefix_cache:
            return False
        wanted = 0 if self.source.params.prompt_logprobs is None else self.num_prompt_tokens - 1
        return self.num_prompt_logprobs_sent >= wanted

    @property
    def readable_hashes(self) -> Sequence[bytes]:
        """Hashes of the full blocks that it may take from the cache."""
        return self.block_hashes if self.reads_cache else ()

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
        self.seat = Seat(step_id)
        if self.first_cached_tokens is None:
            self.first_cached_tokens = num_cached_tokens
            self.first_scheduled_time = time.time()

    def sampled_in(self, step_id: int) -> None:
        """Step `step_id`, which was just planned, samples a token of it."""
        self.seat.num_unknown_tokens += 1
        self.seat.last_sampled_step = step_id

    def learns(self) -> None:
        """The oldest step in flight that samples a token of it has its result."""
        self.seat.num_unknown_tokens -= 1

    def wait(self, step_id: int) -> None:
        """It gave up its slot in step `step_id`, and everything computed so far.

        Tokens that steps in flight sample are dropped, and drawn again: the same ones.
        """
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = self.seat.num_unknown_tokens = 0
        self.rank.steps_behind = 0
        self.rank.waiting_since = step_id

    def displaced(self, step_id: int) -> None:
        """It gave up its slot to a more urgent request in step `step_id`."""
        self.rank.displaced_step = step_id
        self.rank.displaced_tokens = self.num_tokens
