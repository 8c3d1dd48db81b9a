"""A model's weights under one set of names (those of Hugging Face checkpoints), wherever they come from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evensong.protocol.errors import ConfigError
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.resolve import ModelSource
from evensong.sources.safetensors_file import read_safetensors

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Tables that a file may carry and that are computed here.
_IGNORED = re.compile(r"rope_freqs\.weight|.*\.rotary_emb\.inv_freq")
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor. `rotary_heads` > 0: its rows interleave the two rotary halves of that many heads (GGUF)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    rotary_heads: int = 0


class Weights(Mapping[str, TensorEntry]):
    """All tensors of a model by name."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_weights(source: ModelSource) -> Weights:
    """The tensors of `source`, mapped and not copied. Raises ConfigError for damaged or unknown files."""
    entries = _from_gguf(GGUFFile(source.path)) if source.kind == "gguf" else _from_folder(source.path)
    return Weights({entry.name: entry for entry in entries if not _IGNORED.fullmatch(entry.name)})


def source_digest(source: ModelSource) -> str:
    """A digest of weights and tokenizer for the fingerprint.

    Covers names, dtypes, shapes, every file's size, the whole tokenizer and configuration, and of each tensor 4 KiB
    at its start, middle and end: any other training run, quantisation or file differs there.
    """
    digest = hashlib.blake2b(digest_size=16)
    for entry in open_weights(source).values():
        digest.update(f"{entry.name}|{entry.dtype}|{entry.shape}|{len(entry.data)}".encode())
        middle = len(entry.data) // 2
        for start in (0, middle, max(len(entry.data) - _SAMPLE_BYTES, 0)):
            digest.update(entry.data[start : start + _SAMPLE_BYTES].tobytes())
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        first = min((t.data.__array_interface__["data"][0] for t in file.tensors.values()), default=0)
        start = np.frombuffer(file.raw, dtype=np.uint8).__array_interface__["data"][0]
        digest.update(file.raw[: max(first - start, 0)])
    else:
        for path in sorted(source.path.glob("*.json")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _from_gguf(file: GGUFFile) -> list[TensorEntry]:
    architecture = file.get("general.architecture", "llama")
    heads = file.get(f"{architecture}.attention.head_count", 0)
    kv_heads = file.get(f"{architecture}.attention.head_count_kv", heads)
    entries = []
    for tensor in file.tensors.values():
        name = _hf_name(tensor.name)
        rotary = 0
        # Files of the Llama family store q and k with each head's rotary pairs side by side.
        if architecture == "llama" and ".self_attn.q_proj." in name:
            rotary = heads
        elif architecture == "llama" and ".self_attn.k_proj." in name:
            rotary = kv_heads
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, tensor.data, rotary))
    return entries


def _hf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _GGUF_LAYER:
        return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"
    return name


def _from_folder(path: Path) -> list[TensorEntry]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is damaged: {error}") from error
        files = [path / str(name) for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if file.resolve().parent != path.resolve() and not file.is_symlink():
            raise ConfigError(f"{index} names a file outside the folder: {file.name}")
        for name, (dtype, shape, data) in read_safetensors(file).items():
            entries[name] = TensorEntry(name, dtype, shape, data)
    return list(entries.values())
