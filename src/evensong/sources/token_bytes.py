"""The bytes that each token of a vocabulary adds to a text, by the tokenizer's own decoder."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import decoders

from evensong.sources.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """For one tokenizer; tokens are looked at when they are first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        decoder = tokenizer.backend.decoder
        self.byte_level = isinstance(decoder, decoders.ByteLevel)
        self.fallback = None if self.byte_level else ByteFallbackRules.read(decoder)
        self._alphabet = _byte_alphabet()

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text (part of a character, perhaps)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            # The byte-level decoder maps a token only when every character of it stands for a byte.
            if all(character in self._alphabet for character in token):
                return bytes(self._alphabet[character] for character in token)
            return token.encode()
        if self.fallback is not None:
            match = BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else self.fallback.replace(token).encode()
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte (Radford et al., 2019, the released encoder's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class ByteFallbackRules:
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
    def read(cls, decoder: Any) -> ByteFallbackRules | None:
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
