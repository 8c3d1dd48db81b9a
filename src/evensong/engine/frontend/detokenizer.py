"""Incremental detokenizing that is exact: the pieces, joined, equal the decode of all tokens at once.

The tokenizer's own decoder decides how. Byte-level vocabularies are decoded as a byte stream, where only an unfinished
UTF-8 sequence waits. Vocabularies with byte fallback decode a whole run of byte tokens at once, so a run waits for its
end. Any other decoder is asked for the whole text each time, and what may still change waits.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod

from evensong.sources.token_bytes import BYTE_TOKEN, ByteFallbackRules, TokenBytes
from evensong.sources.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(ABC):
    """One output's text so far."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before; may be empty."""

    @abstractmethod
    def finish(self) -> str:
        """What was held back, now that no token follows."""


class TokenTexts(TokenBytes):
    """What each token stands for, by id; made once per tokenizer and shared by all requests."""

    def detokenizer(self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A detokenizer for one output; special tokens that are left out, but for `shown`, have no text."""
        hidden = self.tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        if self.byte_level:
            return _ByteLevelDetokenizer(self, hidden)
        if self.fallback is not None:
            return _ByteFallbackDetokenizer(self, self.fallback, hidden)
        return _WholeTextDetokenizer(self.tokenizer, hidden)

    def text_of(self, token_id: int) -> str:
        """A token's own text; bytes that are no whole character show as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")


class _ByteLevelDetokenizer(Detokenizer):
    def __init__(self, texts: TokenTexts, hidden: frozenset[int]) -> None:
        self._texts = texts
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._texts.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackDetokenizer(Detokenizer):
    def __init__(self, texts: TokenTexts, rules: ByteFallbackRules, hidden: frozenset[int]) -> None:
        self._texts = texts
        self._rules = rules
        self._hidden = hidden
        self._run = b""
        self._to_strip = rules.strip_count

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        token = self._texts.tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        match = BYTE_TOKEN.fullmatch(token)
        if match:
            self._run += bytes([int(match[1], 16)])
            return ""
        return self._strip(self._end_run() + self._rules.replace(token))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        """The run's text; where it is not UTF-8 as a whole, each byte of it is a U+FFFD (the library's rule)."""
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._rules.strip):
                self._to_strip = 0
                break
            text = text[len(self._rules.strip) :]
            self._to_strip -= 1
        return text


class _WholeTextDetokenizer(Detokenizer):
    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._token_ids: list[int] = []
        self._sent = ""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        before = self._decoded()
        self._token_ids.append(token_id)
        text = self._decoded()
        # Certain is what one more token did not change, short of an unfinished character.
        certain = before.rstrip(_REPLACEMENT)
        if not text.startswith(certain) or not certain.startswith(self._sent):
            return ""
        delta, self._sent = certain[len(self._sent) :], certain
        return delta

    def finish(self) -> str:
        text = self._decoded()
        delta = text[len(self._sent) :]
        self._sent = text
        return delta

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=False)
