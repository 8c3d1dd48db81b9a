"""ModelDescription from a GGUF file's metadata."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.families import Family, family_of_gguf, never
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.model_description import ModelDescription, Rope
from evensong.sources.rope import scaled_length, scaled_rope
from evensong.sources.values import number, token_ids, whole

QUANTISED_DTYPE = "bfloat16"
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NO_TOKEN = 0xFFFFFFFF  # a token id of -1, as GGUF stores it


def describe_gguf(path: Path) -> ModelDescription:
    """The description that the metadata and the tensors' names give. Raises what `describe_folder` raises."""
    file = GGUFFile(path)
    family = family_of_gguf(str(file.get("general.architecture", "?")))
    prefix = f"{family.gguf}."
    values = {key.removeprefix(prefix): file.get(key) for key in file.keys if key.startswith(prefix)}
    _refuse_unsupported(file, family, values)
    hidden, heads = whole(values, "embedding_length"), whole(values, "attention.head_count")
    head_dim = whole(values, "attention.key_length", hidden // max(heads, 1))
    rotary_dim = whole(values, "rope.dimension_count", head_dim)
    if family.gguf_pairs and rotary_dim != head_dim:
        raise ConfigError("GGUF files of the Llama family that rotate part of a head are not supported")
    if whole(values, "attention.value_length", head_dim) != head_dim:
        raise ConfigError("heads whose keys and values differ in length are not supported yet")
    num_layers = _num_layers(values)
    window = whole(values, "attention.sliding_window", 0)
    slides = [bool(window) and family.slides(layer, {}) for layer in range(num_layers)]
    scaling, max_positions = _scaling(file, values), whole(values, "context_length")
    theta = number(values, "rope.freq_base", 10000.0)
    full = scaled_rope(theta, rotary_dim, scaling, max_positions)
    if "rope_freqs.weight" in file.tensors:
        full = replace(full, factors=_factors(file, "rope_freqs.weight"))
    local = full
    if family.local_theta is not None:
        local = Rope(number(values, "rope.freq_base_swa", family.local_theta))
    if not family.max_length_is_scaled:
        max_positions = scaled_length(scaling, max_positions)
    bos = _token_ids(file, "bos")
    return ModelDescription(
        family=family.name,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=whole(values, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=whole(values, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rms_norm_eps=float(values["attention.layer_norm_rms_epsilon"]),
        layer_ropes=tuple(local if slide else full for slide in slides),
        layer_windows=tuple(window if slide else None for slide in slides),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in file.tensors,
        torch_dtype=_dtype(file),
        eos_token_ids=tuple(dict.fromkeys(_token_ids(file, "eos", "eot", "eom"))),
        bos_token_id=bos[0] if bos else None,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        activation=family.activation,
        embedding_scale=hidden**0.5 if family.scales_embedding else 1.0,
        query_pre_attn_scalar=family.gguf_query_scalars.get(num_layers),
    )


def _num_layers(values: dict[str, Any]) -> int:
    num_layers = whole(values, "block_count")
    if num_layers > 10_000:
        raise ValueError(f"block_count is {num_layers}")
    return num_layers


def _refuse_unsupported(file: GGUFFile, family: Family, values: dict[str, Any]) -> None:
    if values.get("expert_count"):
        raise ConfigError("GGUF files with experts are not supported yet")
    if family.slides is never and values.get("attention.sliding_window"):
        raise ConfigError(f"GGUF files of the {family.name} family with a sliding window are not supported")
    if file.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{file.path} is one part of a split model; join the parts first")


def _scaling(file: GGUFFile, values: dict[str, Any]) -> dict[str, Any]:
    """Rope scaling in config.json's words."""
    if "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": list(_factors(file, "rope_factors_short.weight")),
            "long_factor": list(_factors(file, "rope_factors_long.weight")),
            "original_max_position_embeddings": values["rope.scaling.original_context_length"],
            "attention_factor": values.get("rope.scaling.attn_factor"),
        }
    factor = number(values, "rope.scaling.factor", number(values, "rope.scale_linear", 0.0))
    # A factor without a type is linear; a factor of 0 is none.
    kind = values.get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none":
        return {}
    original = values.get("rope.scaling.original_context_length")
    return {"rope_type": kind, "factor": factor or None, "original_max_position_embeddings": original}


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    """The values of a table of rope factors."""
    tensor = file.tensors[name]
    if tensor.dtype != "F32":
        raise ConfigError(f"the model file {file.path} holds {name} as {tensor.dtype}, expected F32")
    return struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data)


def _dtype(file: GGUFFile) -> str:
    dtypes = {tensor.dtype for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _PLAIN_DTYPES.get(next(iter(dtypes)), QUANTISED_DTYPE) if len(dtypes) == 1 else QUANTISED_DTYPE


def _token_ids(file: GGUFFile, *names: str) -> list[int]:
    ids = [i for name in names for i in token_ids(file.get(f"tokenizer.ggml.{name}_token_id"))]
    return [i for i in ids if i != _NO_TOKEN]


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding; every token of the tokenizer must have one."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"the model file {file.path} has no token_embd.weight of two dimensions")
    tokens = file.length("tokenizer.ggml.tokens")
    if tokens > embedding.shape[0]:
        raise ConfigError(f"the model file {file.path} has {tokens} tokens and {embedding.shape[0]} embeddings")
    return embedding.shape[0]
