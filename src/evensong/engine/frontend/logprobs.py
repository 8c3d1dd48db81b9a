"""Core log-probabilities to what users read: {token id: Logprob} per position; those of a prompt as they come."""

from __future__ import annotations

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.protocol.output import PromptScores, TokenLogprobs
from evensong.protocol.request_output import Logprob, PromptLogprobs


class TokenGap(Exception):
    """Tokens between what is here and what came are missing: this request cannot be completed."""


class PromptLogprobState:
    """Accepts the log-probabilities of a prompt's tokens from the core, each exactly once."""

    def __init__(self, num_prompt_tokens: int, texts: TokenTexts) -> None:
        self.positions: PromptLogprobs = [None]
        self._num_prompt_tokens = num_prompt_tokens
        self._texts = texts

    @property
    def complete(self) -> bool:
        """True once every token of the prompt is here."""
        return len(self.positions) == self._num_prompt_tokens

    def accept(self, scores: PromptScores) -> int:
        """Takes what is new in `scores`; returns how many positions that are here already differ. Raises TokenGap."""
        known = len(self.positions) - scores.start
        if known < 0:
            raise TokenGap(f"prompt position {len(self.positions)} is missing, {scores.start} came")
        new = [to_logprobs(position, self._texts) for position in scores.positions]
        violations = sum(old != own for old, own in zip(self.positions[scores.start :], new, strict=False))
        self.positions += new[known:]
        return violations


def to_logprobs(position: TokenLogprobs, texts: TokenTexts) -> dict[int, Logprob]:
    """The sampled token first, with its true rank, then the best ones in order, then those that were asked for."""
    sampled = position.token_ids[0]
    entries = {sampled: Logprob(position.logprobs[0], position.rank, texts.text_of(sampled))}
    num_best = len(position.token_ids) - 1 - position.num_asked
    for rank, (token_id, logprob) in enumerate(zip(position.token_ids[1:], position.logprobs[1:], strict=True), 1):
        if token_id not in entries:
            entries[token_id] = Logprob(logprob, rank if rank <= num_best else None, texts.text_of(token_id))
    return entries
