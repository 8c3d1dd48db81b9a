"""Incremental detokenizing that is exact: the pieces, joined, equal the decode of all tokens at once.

The tokenizer's own decoder decides how. Byte-level vocabularies are decoded as a byte stream, where only an unfinished
UTF-8 sequence waits. Vocabularies with byte fallback decode a whole run of byte tokens at once, so a run waits for its
end. Any other decoder is asked for the whole text each time, and what may still change waits.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from typing import Any

from tokenizers import decoders

from evensong.sources.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Detokenizer(ABC):
    """One output's text so far."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before; may be empty."""

    @abstractmethod
    def finish(self) -> str:
        """What was held back, now that no token follows."""


class TokenTexts:
    """What each token stands for, by id; made once per tokenizer and shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        decoder = tokenizer.backend.decoder
        self._byte_level = isinstance(decoder, decoders.ByteLevel)
        self._fallback = None if self._byte_level else _ByteFallbackRules.read(decoder)
        self._alphabet = _byte_alphabet()

    def detokenizer(self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A detokenizer for one output; special tokens that are left out, but for `shown`, have no text."""
        hidden = self.tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        if self._byte_level:
            return _ByteLevelDetokenizer(self, hidden)
        if self._fallback is not None:
            return _ByteFallbackDetokenizer(self, self._fallback, hidden)
        return _WholeTextDetokenizer(self.tokenizer, hidden)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text (part of a character, perhaps)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """A token's own text; bytes that are no whole character show as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # The byte-level decoder maps a token only when every character of it stands for a byte.
            if all(character in self._alphabet for character in token):
                return bytes(self._alphabet[character] for character in token)
            return token.encode()
        if self._fallback is not None:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else self._fallback.replace(token).encode()
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte (Radford et al., 2019, the released encoder's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


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


class _ByteFallbackRules:
    """Replace, ByteFallback, Fuse, and perhaps Strip on the left: how SentencePiece vocabularies are decoded."""

    def __init__(self, replacements: list[tuple[str, str]], strip: str, strip_count: int) -> None:
        self.replacements = replacements
        self.strip = strip
        self.strip_count = strip_count

    def replace(self, token: str) -> str:
        """A token's text before anything is stripped."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    @classmethod
    def read(cls, decoder: Any) -> _ByteFallbackRules | None:
        """The rules of a tokenizers decoder; None when it is of another kind."""
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        steps = state.get("decoders", []) if state.get("type") == "Sequence" else []
        kinds = [step["type"] for step in steps]
        if kinds[-3:] == ["ByteFallback", "Fuse", "Strip"]:
            strip, head = steps[-1], steps[:-3]
        elif kinds[-2:] == ["ByteFallback", "Fuse"]:
            strip, head = {"content": " ", "start": 0, "stop": 0}, steps[:-2]
        else:
            return None
        simple = all(step["type"] == "Replace" and "String" in step["pattern"] for step in head)
        if not simple or strip["stop"]:
            return None
        return cls([(s["pattern"]["String"], s["content"]) for s in head], strip["content"], strip["start"])


class _ByteFallbackDetokenizer(Detokenizer):
    def __init__(self, texts: TokenTexts, rules: _ByteFallbackRules, hidden: frozenset[int]) -> None:
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
        match = _BYTE_TOKEN.fullmatch(token)
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
