"""Ahead: what of a request may be planned while steps before are in flight.

A step samples a request's next token, and until that step's result is applied the token is unknown here. The workers
have it sooner: a later step may compute it, for they fill it in. Only a request's newest token is ever unknown to a
plan, and a request whose unknown token ends it whatever it is (max_tokens, max_model_len) is not planned again.

Steps run in order on the device. So what a request held when it ends, is aborted or preempted is free at once, though
steps in flight still read and write it: whoever gets the blocks writes them in a later step.
"""

from __future__ import annotations

from evensong.scheduler.request import Request


class Ahead:
    """One plan at a time, or several of requests whose tokens are all known: nothing is planned ahead."""

    def begin(self, num_running: int) -> None:
        """A plan begins, with so many running requests."""

    def wanted(self, request: Request, step_id: int) -> int:
        """Tokens that a running request can compute in step `step_id`; 0: it waits for a result."""
        return max(request.num_tokens - request.num_computed_tokens, 0)

    def took(self, request: Request) -> None:
        """The plan has tokens of this running request."""


class Pipelined(Ahead):
    """Steps pass through `stages` one after the other, so that many are computed at once.

    Each plan takes its part of those that decode: else one step would have them all, and the next ones nobody.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._left = 0

    def begin(self, num_running: int) -> None:
        """As Ahead.begin."""
        self._left = -(-num_running // self._stages)

    def wanted(self, request: Request, step_id: int) -> int:
        """As Ahead.wanted."""
        known = super().wanted(request, step_id)
        return known if not _decodes(request) or self._left else 0

    def took(self, request: Request) -> None:
        """As Ahead.took."""
        self._left -= _decodes(request)


class OneStepAhead(Pipelined):
    """The next token is planned while the step that samples the newest one runs, or is about to be applied.

    With several stages that step is as many plans old: a younger one has not left the last stage when the plan reaches
    the first. `max_model_len` ends requests.
    """

    def __init__(self, stages: int, max_model_len: int) -> None:
        super().__init__(stages)
        self._max_model_len = max_model_len

    def wanted(self, request: Request, step_id: int) -> int:
        """As Ahead.wanted."""
        if request.num_unknown_tokens == 1 and request.num_computed_tokens == request.num_tokens:
            old = step_id - request.seat.last_sampled_step >= self._stages
            return int(old and self._left > 0 and not self._ends(request))
        return super().wanted(request, step_id)

    def _ends(self, request: Request) -> bool:
        """Whether its unknown token is the last one, whatever it is."""
        most = request.source.params.max_tokens
        return request.num_tokens + 1 >= self._max_model_len or (
            most is not None and request.num_output_tokens + 1 >= most
        )


def _decodes(request: Request) -> bool:
    """Whether the next token that it computes is one that was sampled."""
    return request.num_computed_tokens >= request.num_prompt_tokens


def make_ahead(num_stages: int, max_concurrent_batches: int, max_model_len: int) -> Ahead:
    """The rules for so many plans in flight: one more than stages means one step ahead."""
    if max_concurrent_batches > num_stages:
        return OneStepAhead(num_stages, max_model_len)
    return Pipelined(num_stages) if num_stages > 1 else Ahead()
