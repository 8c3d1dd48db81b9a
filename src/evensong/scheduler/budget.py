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


class Budget:
    """Tokens left in the step that is being planned."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.left = limits.max_num_batched_tokens

    def share(self, wanted: int) -> int:
        """Tokens that a request which wants `wanted` may compute now; 0 when it must wait."""
        threshold = self.limits.long_prefill_token_threshold
        if self.limits.enable_chunked_prefill:
            if threshold:
                wanted = min(wanted, threshold)
            return min(wanted, self.left)
        return wanted if wanted <= self.left else 0

    def take(self, count: int) -> None:
        """Spends `count` tokens (negative: gives them back)."""
        self.left -= count
        assert self.left >= 0
