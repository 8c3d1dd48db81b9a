"""ModelDescription: the numbers that define a model, from config.json or GGUF metadata."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.resolve import ModelSource

# Architecture names of config.json and GGUF -> family.
FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "llama": "llama"}
QUANTISED_DTYPE = "bfloat16"
_NO_TOKEN = 0xFFFFFFFF  # a token id of -1, as GGUF stores it
DTYPES = ("float32", "float16", "bfloat16")


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
    except ConfigError:
        raise
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"the configuration of the model {source.name!r} cannot be used: {what}") from error
    _check(description, source)
    return description


def _from_folder(path: Path) -> ModelDescription:
    config = _read_json(path / "config.json")
    family = _family(config)
    rope_theta = _refuse_unsupported(config, family)
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    generation = path / "generation_config.json"
    eos = _ids(config.get("eos_token_id"))
    if generation.is_file():
        eos += _ids(_read_json(generation).get("eos_token_id"))
    return ModelDescription(
        family=family,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=_whole(config, "head_dim", hidden // max(heads, 1)),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=rope_theta,
        max_position_embeddings=_whole(config, "max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=_first(_ids(config.get("bos_token_id"))),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "?"
    family = FAMILIES.get(name) if name.endswith("CausalLM") else None
    if family is None:
        known = ", ".join(name for name in FAMILIES if name.endswith("CausalLM"))
        raise ConfigError(f"the architecture {name!r:.80} is not supported; supported: {known}")
    return family


def _refuse_unsupported(config: dict[str, Any], family: str) -> float:
    """The base of the rotary embedding; raises ConfigError for what would change the result and does not exist yet."""
    if config.get("sliding_window") and family == "mistral":
        raise ConfigError("a Mistral model with a sliding window is not supported yet")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"the activation {config['hidden_act']!r:.80} is not supported; supported: silu")
    if config.get("quantization_config"):
        raise ConfigError("checkpoints with a quantization_config are not supported; use GGUF")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope scaling of type {kind!r:.80} is not supported yet")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1):
        raise ConfigError("rotary embedding over part of a head is not supported yet")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)


def _from_gguf(path: Path) -> ModelDescription:
    file = GGUFFile(path)
    architecture = str(file.get("general.architecture", "?"))
    if architecture not in ("llama",):
        raise ConfigError(f"the GGUF architecture {architecture!r:.80} is not supported; supported: llama")
    _refuse_unsupported_gguf(file)
    values = {key.removeprefix("llama."): file.get(key) for key in file.keys if key.startswith("llama.")}
    vocab_size = _gguf_vocab_size(file)
    hidden, heads = _whole(values, "embedding_length"), _whole(values, "attention.head_count")
    head_dim = _whole(values, "attention.key_length", hidden // max(heads, 1))
    if _whole(values, "rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("rotary embedding over part of a head is not supported yet")
    if _whole(values, "attention.value_length", head_dim) != head_dim:
        raise ConfigError("heads whose keys and values differ in length are not supported yet")
    dtypes = {tensor.dtype for tensor in file.tensors.values() if len(tensor.shape) > 1}
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return ModelDescription(
        family=FAMILIES[architecture],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_whole(values, "feed_forward_length"),
        num_layers=_whole(values, "block_count"),
        num_heads=heads,
        num_kv_heads=_whole(values, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=float(values["attention.layer_norm_rms_epsilon"]),
        rope_theta=float(values.get("rope.freq_base", 10000.0)),
        max_position_embeddings=_whole(values, "context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        torch_dtype=plain[next(iter(dtypes))] if len(dtypes) == 1 and dtypes <= set(plain) else QUANTISED_DTYPE,
        eos_token_ids=tuple(dict.fromkeys(_gguf_ids(file, "eos", "eot", "eom"))),
        bos_token_id=_first(_gguf_ids(file, "bos")),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _gguf_ids(file: GGUFFile, *names: str) -> list[int]:
    ids = [i for name in names for i in _ids(file.get(f"tokenizer.ggml.{name}_token_id"))]
    return [i for i in ids if i != _NO_TOKEN]


def _refuse_unsupported_gguf(file: GGUFFile) -> None:
    scaled = file.get("llama.rope.scaling.type", "none") != "none" or file.get("llama.rope.scale_linear", 1.0) != 1.0
    if scaled or "rope_freqs.weight" in file.tensors:
        raise ConfigError("GGUF files with rope scaling are not supported yet")
    if file.get("llama.expert_count"):
        raise ConfigError("GGUF files with experts are not supported yet")
    if file.get("llama.attention.sliding_window"):
        raise ConfigError("GGUF files with a sliding window are not supported yet")
    if file.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{file.path} is one part of a split model; join the parts first")


def _gguf_vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding; every token of the tokenizer must have one."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"the model file {file.path} has no token_embd.weight of two dimensions")
    tokens = file.length("tokenizer.ggml.tokens")
    if tokens > embedding.shape[0]:
        raise ConfigError(f"the model file {file.path} has {tokens} tokens and {embedding.shape[0]} embeddings")
    return embedding.shape[0]


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
            raise ConfigError(f"the model {source.name!r} has {name} {size}, which cannot be")
    if model.num_heads % model.num_kv_heads or model.head_dim % 2:
        raise ConfigError(
            f"the model {source.name!r} has {model.num_heads} heads of {model.head_dim} on {model.num_kv_heads} KV "
            "heads, which cannot be"
        )
    if not (0 < model.rms_norm_eps < 1 and 1 < model.rope_theta < math.inf):
        raise ConfigError(
            f"the model {source.name!r} has rms_norm_eps {model.rms_norm_eps}, rope_theta {model.rope_theta}, "
            "which cannot be"
        )
    if model.torch_dtype not in DTYPES:
        raise ConfigError(
            f"the dtype {model.torch_dtype!r:.80} of the model {source.name!r} is not supported; "
            f"supported: {', '.join(DTYPES)}"
        )
    for token_id in (*model.eos_token_ids, *(() if model.bos_token_id is None else (model.bos_token_id,))):
        if not 0 <= token_id < model.vocab_size:
            raise ConfigError(
                f"the model {source.name!r} names token {token_id}, which is not among its {model.vocab_size}"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def _whole(values: dict[str, Any], key: str, default: int | None = None) -> int:
    """The size under `key`, which must be a whole number; raises KeyError where it is missing without a default."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r:.80}, not a whole number")
    return value


def _ids(value: Any) -> list[int]:
    """Token ids from nothing, one id or a list."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ValueError(f"{value!r:.80} where token ids belong")
    return list(ids)


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None
