"""Budget: the tokens that one step may still hold, and how many a request gets of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step, a request and the queue; resolved at start-up."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    # False: every request has priority 0, whatever it was sent with.
    use_priorities: bool = True


class Budget:
    """Tokens left in the step that is being planned."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.left = limits.max_num_batched_tokens

    def share(self, wanted: int, *, more: int = 0, leave: int = 0) -> int:
        """Tokens that a request which wants `wanted` may compute now; 0: it must wait.

        `more` tokens could be given back to the budget first; `leave` are for others, unless it would be left none.
        """
        threshold = self.limits.long_prefill_token_threshold
        left = self.left + more
        if leave:
            left -= max(min(leave, left - 1), 0)
        if self.limits.enable_chunked_prefill:
            if threshold:
                wanted = min(wanted, threshold)
            return min(wanted, left)
        return wanted if wanted <= left else 0

    def take(self, count: int) -> None:
        """Spends `count` tokens (negative: gives them back)."""
        self.left -= count
        assert self.left >= 0
