"""Vocabulary: a model's tokens as grammar libraries need them. Read when the first constrained request comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from evensong.scheduler.grammar.base import Bitmask
from evensong.sources.token_bytes import TokenBytes
from evensong.sources.tokenizer import Tokenizer

_WORD_BITS = 32
_SPACE = b" \t\r\n"


class Vocabulary:
    """Token ids run from 0 to `size` - 1. Libraries get one token more, `end_id`, that stands for the end of an output.

    So what a grammar allows does not depend on which tokens end a request's output; those are special tokens to it.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], size: int) -> None:
        self._load = load_tokenizer
        self.size = size
        self.end_id = size
        self.num_words = -(-(size + 1) // _WORD_BITS)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._load()

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, and none for the end."""
        texts = TokenBytes(self.tokenizer)
        return [*map(texts.bytes_of, range(self.size)), b""]

    @cached_property
    def special_ids(self) -> list[int]:
        """Tokens that no text contains: special ones, those without bytes, and the end."""
        special = {i for i in self.tokenizer.special_ids if i < self.size}
        return sorted(special.union(i for i, own in enumerate(self.token_bytes) if not own))

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """The spelling of each special token, and its id."""
        names = ((self.tokenizer.id_to_token(i), i) for i in self.tokenizer.special_ids if i < self.size)
        return {name: token_id for name, token_id in names if name}

    @cached_property
    def full_row(self) -> Bitmask:
        """The row [num_words] of all tokens; nobody writes into it."""
        bits = np.arange(self.num_words * _WORD_BITS) < self.size
        row: Bitmask = np.packbits(bits, bitorder="little").view(np.uint32)
        row.flags.writeable = False
        return row

    def new_row(self) -> Bitmask:
        """A row [num_words] of no token."""
        row: Bitmask = np.zeros(self.num_words, dtype=np.uint32)
        return row

    def tokens_past(self, marker: bytes) -> list[list[int]]:
        """For each number of bytes of `marker` that stand already: the tokens that complete it and say more than space.

        Behind such a token a grammar would begin in the middle of one.
        """
        past: list[list[int]] = [[] for _ in marker]
        for token_id, own in enumerate(self.token_bytes):
            place = own.find(marker)
            whole = place >= 0 and bool(own[place + len(marker) :].strip(_SPACE))
            for known in range(len(marker)):
                rest = marker[known:]
                if whole or (own.startswith(rest) and own[len(rest) :].strip(_SPACE)):
                    past[known].append(token_id)
        return past


def set_bits(row: Bitmask, token_ids: Iterable[int]) -> None:
    """Allows these tokens too."""
    for token_id in token_ids:
        row[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)


def clear_bits(row: Bitmask, token_ids: Iterable[int]) -> None:
    """Forbids these tokens."""
    for token_id in token_ids:
        # Hardly any is set, and looking is cheaper.
        if has_bit(row, token_id):
            row[token_id // _WORD_BITS] &= np.uint32(~(1 << token_id % _WORD_BITS) & 0xFFFFFFFF)


def has_bit(row: Bitmask, token_id: int) -> bool:
    """Whether a token is allowed."""
    return bool(int(row[token_id // _WORD_BITS]) >> token_id % _WORD_BITS & 1)
