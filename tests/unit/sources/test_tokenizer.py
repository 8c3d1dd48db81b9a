"""Tokenizers against transformers, through the cache, from folders, and with hostile text."""

from __future__ import annotations

import concurrent.futures
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evensong.protocol.errors import ConfigError, RequestError
from evensong.sources import tokenizer as module
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.gguf_tokenizer import convert
from evensong.sources.resolve import ModelSource
from evensong.sources.tokenizer import Tokenizer, load_tokenizer
from tests.unit.sources.files import SPECIAL, TEMPLATE, VOCAB_SIZE, byte_tokens, tiny_folder, tiny_gguf

TEXTS = (
    "",
    " ",
    "hello world",
    " leading and trailing ",
    "It's 2024-11-30, 12345678901234567890 and 3.14159; I'll pay $1,000,000.00!",
    'def f(x: int) -> str:\n\treturn f"{x!r:>10}"  # tabs\r\n\n\n    if x == 0x1F:\n        pass\n',
    "Größe, façade, naïve, Ærøskøbing, İstanbul, ß",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم",
    "こんにちは世界。你好，世界！안녕하세요 세계",
    "नमस्ते दुनिया ไทยสวัสดี தமிழ்",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪 e\u0301 a\u0308\u0323 \u200b\u200d\ufeff \u00a0nbsp",
    "\x00\x01\x7f control \x1b[0m",
    "x" * 300 + " " * 70 + "\n" * 9 + "\t" * 5,
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|><|endoftext|>b <|im_start|> <|im_ start|>",
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Any:
    """A cache of this module's own, made after the demo model was found in the real one."""
    patch = pytest.MonkeyPatch()
    patch.setenv("EVENSONG_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("gguf", demo_model, "demo"))


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    return by_transformers(demo_model)


def by_transformers(path: Path) -> Any:
    """A file's tokenizer as transformers converts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_demo_agrees_with_transformers(demo: Tokenizer, theirs: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == theirs.encode(text)
    assert demo.decode(ids, skip_special_tokens=False) == text
    assert demo.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_demo_names_agree_with_transformers(demo: Tokenizer, theirs: Any) -> None:
    assert demo.chat_template == theirs.chat_template
    assert (demo.bos_token_id, demo.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert demo.special_tokens_map["eos_token"] == theirs.eos_token == "<|im_end|>"
    added = theirs.backend_tokenizer.get_added_tokens_decoder()
    assert demo.special_ids == frozenset(i for i, token in added.items() if token.special) == frozenset(range(17))
    assert demo.vocab_size == len(theirs) == 49152
    for token_id in (0, 1, 17, 1000, 49151):
        token = theirs.convert_ids_to_tokens(token_id)
        assert demo.id_to_token(token_id) == token and demo.token_to_id(token) == token_id
    assert demo.id_to_token(49152) is None and demo.token_to_id("no such token") is None


# The model has no token for some bytes: control characters, and the first byte of planes that hold no characters.
WRITABLE = st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF) | st.sampled_from("\n\r\t")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(WRITABLE, max_size=40))
def test_any_text_comes_back(demo: Tokenizer, text: str) -> None:
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \ud83d", "\udcff"])
def test_lone_surrogates_are_the_callers_mistake(demo: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        demo.encode(text)
    assert caught.value.status == 400


@pytest.mark.parametrize("token_id", [-1, 49152, 2**31, 2**32, 2**63])
def test_ids_outside_the_vocabulary_are_the_callers_mistake(demo: Tokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=r"0\.\.49151"):
        demo.decode([5, token_id])


def test_threads_get_the_same_ids(demo: Tokenizer) -> None:
    expected = [demo.encode(text) for text in TEXTS]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: [demo.encode(text) for text in TEXTS], range(40)):
            assert result == expected


def test_cached_conversion_is_the_same_and_quick(demo: Tokenizer, demo_model: Path, monkeypatch: Any) -> None:
    def never(file: GGUFFile) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(module, "convert", never)
    started = time.perf_counter()
    again = load_tokenizer(ModelSource("gguf", demo_model, "demo"))
    assert time.perf_counter() - started < 2.0
    assert again.backend.to_str() == demo.backend.to_str()
    assert (again.chat_template, again.special_tokens_map) == (demo.chat_template, demo.special_tokens_map)


def cached_files() -> list[Path]:
    return sorted((Path(os.environ["EVENSONG_CACHE"]) / "tokenizers").glob("*/*"))


def test_damaged_cache_is_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path / "cache"))
    source = tiny_gguf(tmp_path / "tiny.gguf")
    expected = load_tokenizer(source).encode("hello world")
    assert {path.name for path in cached_files()} == {"tokenizer.json", "extra.json"}
    for path in cached_files():
        sound = path.read_bytes()
        for damage in (b"", sound[: len(sound) // 2], b"[]", b"\xff\xfe"):
            path.write_bytes(damage)
            assert load_tokenizer(source).encode("hello world") == expected
            assert path.read_bytes() == sound


def test_another_file_of_the_same_name_is_another_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    first = load_tokenizer(tiny_gguf(path)).encode("hello")
    second = load_tokenizer(tiny_gguf(path, {"tokenizer.ggml.merges": ["h e"]})).encode("hello")
    assert len(first) == 1 and len(second) == 4


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path / "file"))
    assert len(load_tokenizer(tiny_gguf(tmp_path / "tiny.gguf")).encode("hello")) == 1


def test_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder(tmp_path / "m"))
    assert tokenizer.special_tokens_map == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (1, 2, TEMPLATE)
    assert tokenizer.vocab_size == VOCAB_SIZE and tokenizer.special_ids == frozenset({0, 1, 2})
    ids = tokenizer.encode("hello world<|im_end|>")
    assert ids == [byte_tokens().index(token) for token in ("hello", "Ġworld", "<|im_end|>")]
    assert tokenizer.decode(ids) == "hello world"


def test_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m")
    (source.path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(source).chat_template == "from the file"
    (source.path / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (source.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(source).chat_template == "yes"


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m")
    tokenizer = load_tokenizer(source)
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=64)
    tokenizer.backend.save(str(source.path / "tokenizer.json"))
    assert len(load_tokenizer(source).encode("hello world hello world")) == 5


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b'{"chat_template": {"a": 1}}'),
        ("chat_template.jinja", b"\xff\xff"),
    ],
)
def test_damaged_folder_is_a_config_error(tmp_path: Path, file: str, content: bytes) -> None:
    source = tiny_folder(tmp_path / "m")
    (source.path / file).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(source)
    assert "\n" not in str(caught.value)


def gguf_tokenizer(tmp_path: Path, **metadata: Any) -> Tokenizer:
    """The tokenizer of a tiny file whose `tokenizer.ggml` values are replaced."""
    values = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    converted = convert(GGUFFile(tiny_gguf(tmp_path / "t.gguf", values).path))
    return Tokenizer(converted.backend, chat_template=converted.chat_template, special_tokens=converted.special_tokens)


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    plain = gguf_tokenizer(tmp_path).encode("hello")
    asked = gguf_tokenizer(tmp_path, add_bos_token=True)
    assert asked.encode("hello") == [1, *plain]
    assert asked.encode("hello", add_special_tokens=False) == plain
    assert asked.decode(asked.encode("hello")) == "hello"


def test_llama3_starts_with_bos_and_keeps_whole_words(tmp_path: Path) -> None:
    # "old" is in the vocabulary and no merge makes it.
    tokens, types = [*byte_tokens(), "old"], [3] * 3 + [1] * (VOCAB_SIZE - 2)
    for pre, expected in (("llama-bpe", [1, VOCAB_SIZE]), ("gpt-2", None)):
        tokenizer = gguf_tokenizer(tmp_path, tokens=tokens, token_type=types, pre=pre)
        ids = tokenizer.encode("old")
        assert ids == expected if expected else len(ids) == 2


SINGLE = ["1", "2", "3", "4"]
DIGITS = {
    "smollm": SINGLE,
    "llama-bpe": ["123", "4"],
    "dbrx": ["123", "4"],
    "qwen2": SINGLE,
    "deepseek-r1-qwen": SINGLE,
    "tekken": SINGLE,
    "gpt-4o": ["123", "4"],
    "gpt-2": ["1234"],
}


@pytest.mark.parametrize("pre", DIGITS)
def test_pre_tokenizers_split_digits_as_their_models_do(tmp_path: Path, pre: str) -> None:
    steps = gguf_tokenizer(tmp_path, pre=pre).backend.pre_tokenizer
    assert [piece for piece, _ in steps.pre_tokenize_str("1234")] == DIGITS[pre]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("dbrx", ["HelloWorld", "ĠDon", "'t", "Ġ//ĊĊ", "x"]),
        ("tekken", ["Hello", "World", "ĠDon", "'t", "Ġ//ĊĊ", "x"]),
        ("gpt-4o", ["Hello", "World", "ĠDon't", "Ġ//ĊĊ", "x"]),
    ],
)
def test_words_are_split_as_their_models_do(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    steps = gguf_tokenizer(tmp_path, pre=pre).backend.pre_tokenizer
    assert [piece for piece, _ in steps.pre_tokenize_str("HelloWorld Don't //\n\nx")] == pieces


@pytest.mark.parametrize(
    ("pre", "reference"), [("llama-bpe", "llama-bpe"), ("qwen2", "qwen2"), ("gpt-2", None), ("smollm", None)]
)
def test_pre_tokenizers_agree_with_transformers(tmp_path: Path, pre: str, reference: str | None) -> None:
    """On text without digits, where the library knows no rule of its own for the name."""
    mine = gguf_tokenizer(tmp_path, pre=pre).backend.pre_tokenizer
    their = by_transformers(tmp_path / "t.gguf").backend_tokenizer.pre_tokenizer
    for text in TEXTS:
        if reference is None:
            text = "".join(c for c in text if not c.isnumeric())
        assert mine.pre_tokenize_str(text) == their.pre_tokenize_str(text)


def sentencepiece_values() -> dict[str, Any]:
    """A vocabulary with byte fallback: pieces score by length, as SentencePiece BPE scores by order of merging."""
    pieces = ["▁", *"helowrd", "he", "ll", "hell", "hello", "▁hello", "wo", "wor", "ld", "world", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    return {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "merges": None,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, **sentencepiece_values())
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("hello world")]
    assert tokens == ["<s>", "▁hello", "▁world"]
    emoji = [tokenizer.id_to_token(i) for i in tokenizer.encode("é🙂", add_special_tokens=False)]
    assert emoji == ["▁", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.special_ids == frozenset({0, 1, 2})
    for text in ("hello world", "  two spaces", "é🙂\n\ttabs", "日本 hello</s>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("</s>", "")


def test_sentencepiece_agrees_with_transformers(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, **sentencepiece_values())
    theirs = by_transformers(tmp_path / "t.gguf")
    for text in ("hello world", "world hello hello", "é🙂 hello", "日本\nworld", "hell wor ld  hello"):
        assert tokenizer.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": None}, "None"),
        ({"pre": "viking"}, "'viking'"),
        ({"tokens": None}, "no tokenizer"),
        ({"tokens": [1, 2, 3]}, "tokens is not an array of str"),
        ({"tokens": "abc"}, "tokens is not an array of str"),
        ({"merges": "a b"}, "merges is not an array of str"),
        ({"token_type": [0.5]}, "token_type is not an array of int"),
        ({"token_type": [3]}, "token types"),
        ({"merges": ["h e", "no such"]}, "damaged"),
        ({"merges": ["one"]}, "damaged"),
        ({"model": "llama"}, "0 scores"),
        ({**sentencepiece_values(), "scores": [1, 2]}, "scores is not an array of float"),
        ({**sentencepiece_values(), "unknown_token_id": 10**6}, "damaged"),
        ({**sentencepiece_values(), "unknown_token_id": True}, "damaged"),
    ],
)
def test_what_cannot_be_converted_gets_one_line(tmp_path: Path, metadata: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        gguf_tokenizer(tmp_path, **metadata)
    assert "\n" not in str(caught.value)


def test_special_tokens_survive_in_any_number(tmp_path: Path) -> None:
    """Thousands of control tokens, as some vocabularies have, must not cost seconds."""
    more = [f"<|reserved_{index}|>" for index in range(3000)]
    tokens = [*byte_tokens(), *more]
    started = time.perf_counter()
    tokenizer = gguf_tokenizer(tmp_path, tokens=tokens, token_type=[3] * 3 + [1] * (VOCAB_SIZE - 3) + [3] * 3000)
    assert time.perf_counter() - started < 3.0
    assert tokenizer.encode("hello<|reserved_2999|>")[-1] == len(tokens) - 1
    assert len(tokenizer.special_ids) == len(SPECIAL) + 3000
