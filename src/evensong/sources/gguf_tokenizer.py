"""GGUF's tokenizer metadata to a `tokenizers.Tokenizer`.

The pre-tokenizers are those that the models' authors published, looked up by the name in `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from evensong.protocol.errors import ConfigError
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.values import is_whole

CONVERSION_VERSION = 2
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What splits a text before its pieces are looked up, by the name in `tokenizer.ggml.pre`.
_SPLITS = {
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_SPLIT),
    "tekken": _TEKKEN_SPLIT,
    "gpt-4o": _GPT4O_SPLIT,
}
# Their vocabularies have whole words that the merges do not reach.
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken", "gpt-4o")


@dataclass(frozen=True)
class ConvertedTokenizer:
    """A tokenizer, its chat template, and its named special tokens (bos_token, eos_token, ...)."""

    backend: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]


def convert(file: GGUFFile) -> ConvertedTokenizer:
    """Builds the tokenizer that `file` describes. Raises ConfigError for kinds that are not supported."""
    kind = file.get("tokenizer.ggml.model")
    tokens: list[str] = _items(file, "tokens", str)
    if not tokens:
        raise ConfigError(f"the model file {file.path} holds no tokenizer")
    with library_errors(f"the tokenizer in {file.path}"):
        if kind == "gpt2":
            backend = _byte_level(file, tokens)
        elif kind == "llama":
            backend = _sentencepiece(file, tokens)
        else:
            raise ConfigError(
                f"the tokenizer kind {kind!r:.80} of {file.path} is not supported; supported: gpt2, llama"
            )
        _add_special_tokens(backend, file, tokens)
        special = _special_tokens(file, tokens)
        # Where the file does not say: SentencePiece and Llama 3 vocabularies start a text with BOS, others do not.
        starts_with_bos = kind == "llama" or file.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
        _prepend_bos(backend, file, tokens, default=starts_with_bos)
    template = file.get("tokenizer.chat_template")
    return ConvertedTokenizer(backend, template if isinstance(template, str) else None, special)


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Makes one ConfigError of whatever the tokenizers library says of a file that contradicts itself.

    It raises bare Exception, and where its Rust code panics a class of its own, which is no Exception at all.
    """
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what} is damaged: {' '.join(str(error).split())[:300]}") from error


def _items(file: GGUFFile, key: str, kind: type) -> list[Any]:
    """An array of the tokenizer's metadata; empty where there is none. Raises ConfigError for anything else."""
    name = f"tokenizer.ggml.{key}"
    items = file.get(name)
    if items is None:
        return []
    if not isinstance(items, list) or (items and type(items[0]) is not kind):
        raise ConfigError(f"the tokenizer in {file.path} is damaged: {name} is not an array of {kind.__name__}")
    return items


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pairs = [tuple(merge.split(" ", 1)) for merge in _items(file, "merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    name = str(file.get("tokenizer.ggml.pre", "default"))
    model = BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, byte_fallback=False, ignore_merges=name in _WHOLE_WORDS)
    backend = Tokenizer(model)
    if name in ("default", "gpt-2"):
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name in _SPLITS:
        steps = _split(_SPLITS[name])
        if _SPLITS[name] == _QWEN2_SPLIT:
            backend.normalizer = normalizers.NFC()
    else:
        raise ConfigError(f"the pre-tokenizer {name!r:.80} of {file.path} is not supported")
    backend.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    scores: list[float] = _items(file, "scores", float)
    if len(scores) != len(tokens):
        raise ConfigError(f"the tokenizer in {file.path} has {len(tokens)} tokens and {len(scores)} scores")
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    if not is_whole(unknown) or not 0 <= unknown < len(tokens):
        raise ConfigError(f"the tokenizer in {file.path} is damaged: its unknown token is {unknown!r:.40}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    if prefix:
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best; as BPE merges, best first."""
    merges: list[tuple[float, str, str]] = []
    for token, index in vocabulary.items():
        pieces = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pieces.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges.extend((scores[index], left, right) for left, right in pieces)
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(backend: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    types: list[int] = _items(file, "token_type", int)
    if types and len(types) != len(tokens):
        raise ConfigError(f"the tokenizer in {file.path} has {len(tokens)} tokens and {len(types)} token types")
    # In one call each: the library rebuilds its search automaton on every call.
    special = [token for token, kind in zip(tokens, types, strict=False) if kind in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if is_whole(token_id) and 0 <= token_id < len(tokens):
            special[name] = tokens[token_id]
    return special


def _prepend_bos(backend: Tokenizer, file: GGUFFile, tokens: list[str], *, default: bool) -> None:
    bos = file.get("tokenizer.ggml.bos_token_id")
    if file.get("tokenizer.ggml.add_bos_token", default) and is_whole(bos) and 0 <= bos < len(tokens):
        token = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, bos)]
        )
