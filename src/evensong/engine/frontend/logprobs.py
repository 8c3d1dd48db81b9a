"""Core log-probabilities to what users read: {token id: Logprob} per position."""

from __future__ import annotations

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.protocol.output import TokenLogprobs
from evensong.protocol.request_output import Logprob


def to_logprobs(position: TokenLogprobs, texts: TokenTexts) -> dict[int, Logprob]:
    """The sampled token first, with its true rank, then the best ones in order."""
    sampled = position.token_ids[0]
    entries = {sampled: Logprob(position.logprobs[0], position.rank, texts.text_of(sampled))}
    for rank, (token_id, logprob) in enumerate(zip(position.token_ids[1:], position.logprobs[1:], strict=True), 1):
        if token_id != sampled:
            entries[token_id] = Logprob(logprob, rank, texts.text_of(token_id))
    return entries
