"""Writes the seeds of the corpus: small sound files, each with another part of its format.

    python -m tests.fuzz.make_seeds

The bytes are put together here, from the formats' descriptions, so that a file can be as small as it may be.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evensong.sources.gguf_file import GGML_TYPES

CORPUS = Path(__file__).parent / "corpus"
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
# name -> (ggml type, shape with the row length last)
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
# key -> (type, value), or for arrays ((ARRAY, item type), values)
Values = Mapping[str, tuple[Any, Any]]


def gguf_bytes(values: Values, tensors: Tensors, version: int = 3, alignment: int = 32) -> bytes:
    """A GGUF file with such metadata, and tensors whose bytes count up."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, (kind, value) in values.items():
        out += _string(key) + _value(kind, value)
    data = b""
    types = {name: (number, block, size) for number, (name, block, size) in GGML_TYPES.items()}
    for name, (dtype, shape) in tensors.items():
        number, block, block_bytes = types[dtype]
        data += bytes(-len(data) % alignment)
        out += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, len(data))
        size = block_bytes
        for length in (*shape[:-1], shape[-1] // block):
            size *= length
        data += bytes(i % 251 for i in range(size))
    return out + bytes(-len(out) % alignment) + data


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: Any, value: Any) -> bytes:
    if isinstance(kind, tuple):
        items = b"".join(_value(kind[1], item)[4:] for item in value)
        return struct.pack("<IIQ", ARRAY, kind[1], len(value)) + items
    return struct.pack("<I", kind) + (_string(value) if kind == STRING else struct.pack("<" + _FORMS[kind], value))


def safetensors_bytes(header: Mapping[str, Any], size: int) -> bytes:
    """A safetensors file with such a header, padded as the format's own library does, and `size` bytes of data."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(i % 251 for i in range(size))


def _model(family: str, tokenizer: Values | None = None, **more: Any) -> Values:
    """The metadata of a model of one layer, two heads of four, and a vocabulary of four."""
    sizes = {"block_count": 1, "context_length": 16, "embedding_length": 8, "feed_forward_length": 8}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, **more}
    values: dict[str, tuple[Any, Any]] = {"general.architecture": (STRING, family)}
    values |= {f"{family}.{key}": (U32, value) for key, value in sizes.items()}
    values[f"{family}.attention.layer_norm_rms_epsilon"] = (F32, 1e-5)
    return {**values, **(tokenizer or {})}


def _tokenizer(model: str, tokens: list[str], pre: str | None = None) -> Values:
    values: dict[str, tuple[Any, Any]] = {
        "tokenizer.ggml.model": (STRING, model),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.token_type": ((ARRAY, I32), [3, *[1] * (len(tokens) - 1)]),
        "tokenizer.ggml.bos_token_id": (U32, 0),
    }
    if pre is None:
        values["tokenizer.ggml.scores"] = ((ARRAY, F32), [0.0] * len(tokens))
        return values
    values["tokenizer.ggml.pre"] = (STRING, pre)
    values["tokenizer.ggml.merges"] = ((ARRAY, STRING), ["a b"])
    values["tokenizer.chat_template"] = (STRING, "{{ messages }}")
    return values


_LAYER = {
    "token_embd.weight": ("F32", (4, 8)),
    "blk.0.attn_q.weight": ("F16", (8, 8)),
    "blk.0.attn_k.weight": ("BF16", (4, 8)),
    "output_norm.weight": ("F32", (8,)),
}
_EVERY_SCALAR = {
    "x.u8": (U8, 255),
    "x.i8": (I8, -1),
    "x.u16": (U16, 9),
    "x.i16": (I16, -9),
    "x.i32": (I32, -9),
    "x.u64": (U64, 2**64 - 1),
    "x.i64": (I64, -(2**63)),
    "x.f64": (F64, 0.1),
    "x.bool": (BOOL, True),
    "x.floats": ((ARRAY, F64), [0.5, -1.0]),
    "x.bools": ((ARRAY, BOOL), [True, False]),
    "x.strings": ((ARRAY, STRING), ["", "ä"]),
}


def models() -> list[tuple[dict[str, tuple[Any, Any]], dict[str, tuple[str, tuple[int, ...]]]]]:
    """Metadata and tensors of small models of several families, the caller's own."""
    tokens = ["<s>", "a", "b", "ab"]
    byte_level = _tokenizer("gpt2", tokens, "smollm")
    longrope = {f"rope_factors_{kind}.weight": ("F32", (2,)) for kind in ("long", "short")}
    original = {"rope.scaling.original_context_length": 8}
    return [
        (dict(_model("llama", byte_level)), dict(_LAYER)),
        (dict(_model("llama", _tokenizer("llama", tokens))), dict(_LAYER)),
        (dict(_model("qwen2", _tokenizer("gpt2", tokens, "qwen2"))), dict(_LAYER)),
        (dict(_model("gemma3", byte_level, **{"attention.sliding_window": 4})), dict(_LAYER)),
        (dict(_model("phi3", byte_level, **original)), {**_LAYER, **longrope}),
    ]


def gguf_seeds() -> dict[str, bytes]:
    """Name -> bytes of each GGUF seed."""
    quantised = [name for name, _, _ in GGML_TYPES.values() if name not in ("F32", "F16", "BF16")]
    rows = {name: next(block for other, block, _ in GGML_TYPES.values() if other == name) for name in quantised}
    names = ("llama", "sentencepiece", "qwen2", "gemma3", "phi3")
    return {
        "empty": gguf_bytes({}, {}),
        "scalars": gguf_bytes(_EVERY_SCALAR, {}),
        "version2": gguf_bytes({"general.architecture": (STRING, "llama")}, {"a": ("F32", (1,))}, version=2),
        **{name: gguf_bytes(*model) for name, model in zip(names, models(), strict=True)},
        "aligned": gguf_bytes({"general.alignment": (U32, 64)}, _LAYER, alignment=64),
        "dimensions": gguf_bytes({}, {"a": ("F32", (1, 2, 1, 3)), "b": ("F16", (3, 1, 2))}),
        "blocks32": gguf_bytes({}, {name: (name, (1, size)) for name, size in rows.items() if size < 256}),
        "blocks256": gguf_bytes({}, {name: (name, (1, size)) for name, size in rows.items() if size == 256}),
    }


def safetensors_seeds() -> dict[str, bytes]:
    """Name -> bytes of each safetensors seed."""

    def info(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

    two = {"a": info("F32", [2, 2], 0, 16), "b": info("BF16", [3], 16, 22)}
    return {
        "empty": safetensors_bytes({}, 0),
        "one": safetensors_bytes({"a": info("F32", [1], 0, 4)}, 4),
        "two": safetensors_bytes(two, 22),
        "metadata": safetensors_bytes({"__metadata__": {"format": "pt", "é": "\u2028"}, **two}, 22),
        "reversed": safetensors_bytes({"a": info("F16", [2], 4, 8), "b": info("F32", [1], 0, 4)}, 8),
        "scalar": safetensors_bytes({"a": info("F16", [], 0, 2)}, 2),
        "nothing": safetensors_bytes({"a": info("F32", [0, 7], 0, 0), "b": info("F32", [1], 0, 4)}, 4),
        "dimensions": safetensors_bytes({"a": info("F16", [1, 2, 1, 2, 1], 0, 8)}, 8),
        "integers": safetensors_bytes({"a": info("I64", [1], 0, 8)}, 8),
        "hole": safetensors_bytes({"a": info("F16", [1], 0, 2), "b": info("F16", [1], 4, 6)}, 6),
        "overlap": safetensors_bytes({"a": info("F16", [2], 0, 4), "b": info("F16", [2], 2, 6)}, 6),
        "cut": safetensors_bytes(two, 22)[:-3],
    }


def main() -> None:
    """Writes both kinds."""
    for kind, seeds in (("gguf", gguf_seeds()), ("safetensors", safetensors_seeds())):
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (CORPUS / kind / f"seed-{name}").write_bytes(data)


if __name__ == "__main__":
    main()
