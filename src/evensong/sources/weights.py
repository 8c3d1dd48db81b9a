"""A model's weights under one set of names (those of Hugging Face checkpoints), wherever they come from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evensong.protocol.errors import ConfigError
from evensong.sources.families import family_of_gguf
from evensong.sources.gguf_file import GGUFFile, GGUFTensor
from evensong.sources.resolve import ModelSource
from evensong.sources.safetensors_file import read_safetensors
from evensong.sources.values import is_whole

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Tables that a file may carry and that are computed here.
_IGNORED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*\.rotary_emb\.inv_freq")
# Checkpoints of models with images: the text model's tensors, and what belongs to images.
_TEXT = re.compile(r"(?:language_model\.model|model\.language_model)\.|language_model\.(?=lm_head\.)")
_IMAGES = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
_INDEX = "model.safetensors.index.json"
_HASH_WHOLE_BYTES = 256 * 10**6
_HASH_HEAD_BYTES = 32 << 20
_STRIDE_BYTES = 1 << 20
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
    """A digest of weights, tokenizer and configuration for the fingerprint.

    Every byte counts while all files together have at most 256 MB. Of larger models it covers each file's size, its
    first 32 MiB and 4 KiB of every further MiB, where no other training run or quantisation is the same. Raises
    ConfigError for files that cannot be read.
    """
    if source.kind == "gguf":
        files = [source.path]
    else:
        files = [*_folder_files(source.path), *sorted(source.path.glob("*.json")), *sorted(source.path.glob("*.jinja"))]
    digest = hashlib.sha256()
    try:
        sizes = [path.stat().st_size for path in files]
        for path, size in zip(files, sizes, strict=True):
            name = "" if source.kind == "gguf" else path.name
            digest.update(f"{name}|{size}|".encode())
            _hash_file(digest, path, whole=sum(sizes) <= _HASH_WHOLE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the model {source.name!r}: {error}") from error
    return digest.hexdigest()[:32]


def _hash_file(digest: hashlib._Hash, path: Path, *, whole: bool) -> None:
    with open(path, "rb") as file:
        at = 0
        while chunk := file.read(_STRIDE_BYTES if whole or at < _HASH_HEAD_BYTES else _SAMPLE_BYTES):
            digest.update(chunk)
            at += _STRIDE_BYTES
            file.seek(at)


def _from_gguf(file: GGUFFile) -> list[TensorEntry]:
    family = family_of_gguf(str(file.get("general.architecture", "?")))
    heads = file.get(f"{family.gguf}.attention.head_count")
    kv_heads = file.get(f"{family.gguf}.attention.head_count_kv", heads)
    layer_names = {**_GGUF_LAYER, **family.gguf_names}
    entries = []
    for tensor in file.tensors.values():
        name = _hf_name(tensor.name, layer_names)
        rotary = 0
        if family.gguf_pairs and ".self_attn.q_proj." in name:
            rotary = _rotary_heads(file, tensor, heads)
        elif family.gguf_pairs and ".self_attn.k_proj." in name:
            rotary = _rotary_heads(file, tensor, kv_heads)
        data = np.frombuffer(tensor.data, dtype=np.uint8)
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, data, rotary))
    return entries


def _rotary_heads(file: GGUFFile, tensor: GGUFTensor, heads: Any) -> int:
    if not is_whole(heads) or heads <= 0 or tensor.shape[0] % (2 * heads):
        raise ConfigError(
            f"the model file {file.path} is damaged: {tensor.name} has {tensor.shape[0]} rows for {heads!r:.40} heads"
        )
    return heads


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    return name


def _from_folder(path: Path) -> list[TensorEntry]:
    shards = _weight_map(path)
    entries: dict[str, TensorEntry] = {}
    files: dict[str, str] = {}
    for file in _folder_files(path):
        for name, (dtype, shape, data) in read_safetensors(file).items():
            if shards.get(name, file.name) != file.name:
                continue  # the index knows which of two is meant
            if name in entries:
                raise ConfigError(f"tensor {name!r:.80} is both in {path / files[name]} and in {file.name}")
            entries[name] = TensorEntry(name, dtype, shape, data)
            files[name] = file.name
    for name, shard in shards.items():
        if name not in entries:
            raise ConfigError(f"{path / shard} lacks tensor {name!r:.80}, which {_INDEX} says it holds")
    if any(_TEXT.match(name) for name in entries):
        return [replace(entry, name=_text_name(name)) for name, entry in entries.items() if not _IMAGES.match(name)]
    return list(entries.values())


def _text_name(name: str) -> str:
    match = _TEXT.match(name)
    if match is None:
        return name
    return name[match.end() :] if name.startswith("language_model.lm_head.") else f"model.{name[match.end() :]}"


def _folder_files(path: Path) -> list[Path]:
    """The safetensors files that make up the model: those of its index, else model.safetensors, else all."""
    shards = _weight_map(path)
    if shards:
        return [path / name for name in sorted(set(shards.values()))]
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file, as the folder's index says it; empty where it has none. Every file is there."""
    index = path / _INDEX
    if not index.is_file():
        return {}
    try:
        shards = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is damaged: {error!r:.200}") from error
    if not shards:
        raise ConfigError(f"{index} names no file")
    for name, shard in shards.items():
        if not isinstance(shard, str) or "\x00" in shard or (path / shard).parent != path or Path(shard).name != shard:
            raise ConfigError(f"{index} names a file outside the folder for tensor {name!r:.80}: {shard!r:.200}")
    missing = sorted(shard for shard in set(shards.values()) if not (path / shard).is_file())
    if missing:
        name = next(name for name, shard in shards.items() if shard == missing[0])
        more = f", and so are {len(missing) - 1} more of its files" if len(missing) > 1 else ""
        raise ConfigError(f"{str(path / missing[0])!r:.300}, which should hold tensor {name!r:.80}, is missing{more}")
    return shards
