"""bad_words: words to the token sequences that the sampler forbids."""

from __future__ import annotations

from collections.abc import Sequence

from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.tokenizer import Tokenizer


def bad_word_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The sequences of each word, as it stands at the beginning of a text and after a space.

    A word that a model spells with other tokens than its tokenizer does is not met: this is what vLLM's users get too.
    Raises RequestError for a word of which the tokenizer leaves nothing.
    """
    sequences: list[list[int]] = []
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if not token_ids:
                raise RequestError(f"bad_words holds {word!r:.60}, which has no token", param="bad_words")
            if token_ids not in sequences:
                sequences.append(token_ids)
    return sequences


def check_something_is_left(params: SamplingParams, ends: Sequence[int]) -> None:
    """Raises RequestError where the settings forbid every token from the start; `ends` are the model's EOS ids."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids)
    left.difference_update(sequence[0] for sequence in params.bad_words_token_ids or () if len(sequence) == 1)
    if not left:
        raise RequestError("bad_words forbids every one of allowed_token_ids", param="allowed_token_ids")
    if params.min_tokens:
        left.difference_update(params.stop_token_ids or (), () if params.ignore_eos else ends)
        if not left:
            raise RequestError(
                "allowed_token_ids holds only tokens that end the output, which min_tokens forbids",
                param="allowed_token_ids",
            )
