"""Tokenizer: text to token ids and back, from tokenizer.json (folders) or GGUF metadata (converted once, cached)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from evensong.protocol.errors import ConfigError, RequestError
from evensong.sources.cache import cache_dir, write_atomically
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.gguf_tokenizer import CONVERSION_VERSION, convert, library_errors
from evensong.sources.resolve import ModelSource

_LONG_TEXT = 4096  # characters


class Tokenizer:
    """Thread-safe wrapper of a `tokenizers.Tokenizer` with what templates and detokenizing need."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens_map = special_tokens or {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocabulary), default=1)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, where the tokenizer names one."""
        return self._named("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The token that starts a text, where the tokenizer names one."""
        return self._named("bos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises RequestError for text that no UTF-8 can hold (lone surrogates)."""
        try:
            if len(text) > _LONG_TEXT:
                # Only this call lets other threads run meanwhile.
                ids: list[int] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            else:
                ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            # The library reports text with surrogates as "not a string".
            raise RequestError("the text holds a lone surrogate, which UTF-8 cannot hold", param="prompt") from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all of `token_ids` at once. Raises RequestError for ids outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise RequestError(f"token ids must be in 0..{self.vocab_size - 1}", param="token_ids")
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id that it does not have."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def _named(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.token_to_id(token)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model. Raises ConfigError in one line when it is missing or damaged."""
    return _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.path)


def _from_folder(path: Path) -> Tokenizer:
    config: dict[str, Any] = {}
    try:
        text = (path / "tokenizer.json").read_text(encoding="utf-8")
        if (path / "tokenizer_config.json").is_file():
            config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("chat_template")
        if (path / "chat_template.jinja").is_file():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        elif isinstance(template, list):
            template = {item["name"]: item["template"] for item in template}.get("default")
        if template is not None and not isinstance(template, str):
            raise TypeError("the chat template is not text")
        special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the tokenizer in {path} cannot be used: {error}") from error
    backend = _parse(text, str(path / "tokenizer.json"))
    return Tokenizer(backend, chat_template=template, special_tokens=special)


def _from_gguf(path: Path) -> Tokenizer:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror}") from error
    key = f"{CONVERSION_VERSION}|{tokenizers.__version__}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    cached = (
        cache_dir() / "tokenizers" / hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest() / "tokenizer.json"
    )
    extra_path = cached.with_name("extra.json")
    try:
        extra = json.loads(extra_path.read_text(encoding="utf-8"))
        with library_errors(str(cached)):
            backend = tokenizers.Tokenizer.from_file(str(cached))
        return Tokenizer(backend, chat_template=extra["chat_template"], special_tokens=extra["special_tokens"])
    except Exception:
        pass
    converted = convert(GGUFFile(path))
    try:
        write_atomically(cached, converted.backend.to_str().encode())
        extra = {"chat_template": converted.chat_template, "special_tokens": converted.special_tokens}
        write_atomically(extra_path, json.dumps(extra).encode())
    except OSError:
        pass  # a cache that cannot be written costs the next start some time, nothing else
    return Tokenizer(converted.backend, chat_template=converted.chat_template, special_tokens=converted.special_tokens)


def _parse(text: str, where: str) -> tokenizers.Tokenizer:
    with library_errors(where):
        return tokenizers.Tokenizer.from_str(text)
