"""Joined pieces equal the decode of everything at once, whatever the tokens and the tokenizer."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import Tokenizer, load_tokenizer
from evensong.testing.byte_tokenizer import FIRST_BYTE, byte_ids, byte_tokenizer

HARD_TEXTS = [
    "plain words, 123",
    "naïve café über",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 tone",
    "日本語の文章、漢字とかな。한국어",
    "e\u0301 a\u030a\u0323 o\u0302\u0301 \u0915\u094d\u0937",
    "שלום \u202eعربي\u202c",
    "\U0001f1e9\U0001f1ea\U0010ffff\ufffd\x00\x7f",
]


def sentencepiece(*, strip: bool) -> Tokenizer:
    """A vocabulary with byte fallback, as Llama 2 and Gemma have."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁a", "b", "▁▁", "é", "日", "▁the", "👍", "\ufffd", ""]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    steps: list[object] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    return Tokenizer(backend)


def word_tokenizer(decoder: object, pieces: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=pieces[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(pieces[0], special=True)])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte-level": byte_tokenizer(),
    "sentencepiece": sentencepiece(strip=True),
    "gemma": sentencepiece(strip=False),
    "metaspace": word_tokenizer(decoders.Metaspace(), ["<u>", "▁a", "b", "▁", "日", "▁▁c", "\ufffd"]),
    "wordpiece": word_tokenizer(decoders.WordPiece(), ["<u>", "a", "##b", ".", "n't", ",", "##", "é"]),
    "suffix": word_tokenizer(decoders.BPEDecoder(), ["<u>", "a</w>", "b", "c</w>", "</w>", "日"]),
    "none": word_tokenizer(None, ["<u>", "a", "b c", "日"]),
}


def joined(texts: TokenTexts, token_ids: list[int], skip: bool) -> str:
    detokenizer = texts.detokenizer(skip)
    return "".join([detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_equal_the_whole(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    assert joined(TokenTexts(tokenizer), token_ids, skip) == tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_some_special_tokens_can_be_shown(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size - 1, 20)), max_size=24))
    shown = data.draw(st.frozensets(st.sampled_from(sorted(tokenizer.special_ids))))
    detokenizer = TokenTexts(tokenizer).detokenizer(skip, shown)
    pieces = [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()]
    kept = [i for i in token_ids if not skip or i in shown or i not in tokenizer.special_ids]
    assert "".join(pieces) == tokenizer.decode(kept, skip_special_tokens=False)


@given(st.binary(max_size=24))
@settings(max_examples=400, deadline=None)
def test_any_bytes(data: bytes) -> None:
    for name in ("byte-level", "sentencepiece"):
        first = FIRST_BYTE if name == "byte-level" else 3
        token_ids = [first + byte for byte in data]
        tokenizer = TOKENIZERS[name]
        assert joined(TokenTexts(tokenizer), token_ids, True) == tokenizer.decode(token_ids, True)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_back_and_nothing_partial_is_shown(text: str) -> None:
    texts = TokenTexts(TOKENIZERS["byte-level"])
    detokenizer = texts.detokenizer(True)
    shown = ""
    for token_id in byte_ids(text):
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def test_a_character_is_shown_with_its_last_byte() -> None:
    detokenizer = TokenTexts(byte_tokenizer()).detokenizer(True)
    assert [detokenizer.push(token_id) for token_id in byte_ids("a👍b")] == ["a", "", "", "", "👍", "b"]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    tokenizer = byte_tokenizer()
    token_ids = byte_ids("x👍")[:-1]
    detokenizer = TokenTexts(tokenizer).detokenizer(True)
    assert "".join(detokenizer.push(token_id) for token_id in token_ids) == "x"
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(token_ids)[1:]


def test_the_leading_space_of_sentencepiece_is_dropped_once() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer.token_to_id(token) or 0 for token in ("▁▁", "▁a", "b")]
    assert joined(TokenTexts(tokenizer), ids, True) == "  ab" == tokenizer.decode(ids)


def test_special_tokens_are_shown_only_when_asked() -> None:
    texts = TokenTexts(byte_tokenizer())
    ids = [0, *byte_ids("hi"), 1]
    assert joined(texts, ids, True) == "hi"
    assert joined(texts, ids, False) == "<s0>hi<s1>"


def test_bytes_of_partial_characters() -> None:
    texts = TokenTexts(byte_tokenizer())
    ids = byte_ids("é")
    assert b"".join(texts.bytes_of(token_id) for token_id in ids) == "é".encode()
    assert texts.text_of(ids[0]) == "\ufffd"
    assert texts.bytes_of(0) == b"<s0>"
    fallback = TokenTexts(TOKENIZERS["sentencepiece"])
    assert fallback.bytes_of(3 + 0xC3) == b"\xc3"
    assert fallback.text_of(TOKENIZERS["sentencepiece"].token_to_id("▁the") or 0) == " the"


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(demo_model), progress=False))


class TestDemo:
    """The demo model's vocabulary, all of it."""

    def test_random_tokens(self, tokenizer: Tokenizer) -> None:
        texts, rng = TokenTexts(tokenizer), random.Random(5)
        for round_ in range(1500):
            limit = 300 if round_ % 2 else tokenizer.vocab_size  # the first ids hold the single bytes
            ids = [rng.randrange(limit) for _ in range(rng.randint(1, 30))]
            skip = round_ % 3 > 0
            assert joined(texts, ids, skip) == tokenizer.decode(ids, skip)

    def test_every_token_alone(self, tokenizer: Tokenizer) -> None:
        texts = TokenTexts(tokenizer)
        for token_id in range(tokenizer.vocab_size):
            assert joined(texts, [token_id], False) == tokenizer.decode([token_id], False)

    @pytest.mark.parametrize("text", HARD_TEXTS)
    def test_hard_texts(self, tokenizer: Tokenizer, text: str) -> None:
        assert joined(TokenTexts(tokenizer), tokenizer.encode(text, False), True) == text

    def test_speed(self, tokenizer: Tokenizer) -> None:
        """64 streams advance by a token in well under a step of any model."""
        texts, rng = TokenTexts(tokenizer), random.Random(7)
        streams = [texts.detokenizer(True) for _ in range(64)]
        ids = [[rng.randrange(tokenizer.vocab_size) for _ in range(64)] for _ in range(50)]
        best = float("inf")
        for row in ids:
            start = time.perf_counter()
            for stream, token_id in zip(streams, row, strict=True):
                stream.push(token_id)
            best = min(best, time.perf_counter() - start)
        assert best < 0.002
