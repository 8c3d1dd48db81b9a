"""ModelDescription: the numbers that define a model, from config.json or GGUF metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.resolve import ModelSource

# Architecture names of config.json and GGUF -> family.
FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "llama": "llama"}
QUANTISED_DTYPE = "bfloat16"


@dataclass(frozen=True)
class ModelDescription:
    """What a model is; sizes in elements. `vocab_size` counts the rows of the embedding, padding included."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False


def load_model_description(source: ModelSource) -> ModelDescription:
    """The description of `source`. Raises ConfigError naming what is missing, wrong or not supported yet."""
    try:
        description = _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.path)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"the configuration of the model {source.name} cannot be used: {what}") from error
    _check(description, source)
    return description


def _from_folder(path: Path) -> ModelDescription:
    config = _read_json(path / "config.json")
    names = config.get("architectures") or ["?"]
    family = FAMILIES.get(str(names[0]))
    if family is None:
        known = ", ".join(name for name in FAMILIES if name.endswith("CausalLM"))
        raise ConfigError(f"the architecture {names[0]} is not supported; supported: {known}")
    if config.get("sliding_window") and family == "mistral":
        raise ConfigError("a Mistral model with a sliding window is not supported yet")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"the activation {config['hidden_act']} is not supported; supported: silu")
    if config.get("quantization_config"):
        raise ConfigError("checkpoints with a quantization_config are not supported; use GGUF")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"rope scaling of type {rope.get('rope_type', rope.get('type'))} is not supported yet")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    generation = path / "generation_config.json"
    eos = _ids(config.get("eos_token_id"))
    if generation.is_file():
        eos += _ids(_read_json(generation).get("eos_token_id"))
    return ModelDescription(
        family=family,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // max(heads, 1)),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        max_position_embeddings=int(config["max_position_embeddings"]),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=_first(_ids(config.get("bos_token_id"))),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _from_gguf(path: Path) -> ModelDescription:
    file = GGUFFile(path)
    architecture = str(file.get("general.architecture", "?"))
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(f"the GGUF architecture {architecture!r} is not supported; supported: llama")

    def value(key: str, default: Any = None) -> Any:
        found = file.get(f"{architecture}.{key}", default)
        if found is None:
            raise KeyError(f"{architecture}.{key}")
        return found

    if file.get(f"{architecture}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensors:
        raise ConfigError("GGUF files with rope scaling are not supported yet")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"the model file {path} has no token_embd.weight")
    hidden, heads = int(value("embedding_length")), int(value("attention.head_count"))
    head_dim = int(value("attention.key_length", hidden // max(heads, 1)))
    if int(value("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError("rotary embedding over part of a head is not supported yet")
    dtypes = {tensor.dtype for tensor in file.tensors.values() if len(tensor.shape) > 1}
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    eos = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelDescription(
        family=family,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(value("feed_forward_length")),
        num_layers=int(value("block_count")),
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        max_position_embeddings=int(value("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        torch_dtype=plain[next(iter(dtypes))] if len(dtypes) == 1 and dtypes <= set(plain) else QUANTISED_DTYPE,
        eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos if i is not None)),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _check(model: ModelDescription, source: ModelSource) -> None:
    sizes = {
        name: getattr(model, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
    }
    for name, size in sizes.items():
        if not 1 <= size <= 2**31 - 1:
            raise ConfigError(f"the model {source.name} has {name} {size}, which cannot be")
    if model.num_heads % model.num_kv_heads or model.head_dim % 2:
        raise ConfigError(
            f"the model {source.name} has {model.num_heads} heads of {model.head_dim} on {model.num_kv_heads} KV heads, "
            "which cannot be"
        )
    if not (model.rms_norm_eps > 0 and model.rope_theta > 1):
        raise ConfigError(
            f"the model {source.name} has rms_norm_eps {model.rms_norm_eps}, rope_theta {model.rope_theta}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None
