"""ModelDescription from a folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.families import Family, family_of_architecture, never
from evensong.sources.model_description import Activation, ModelDescription, Rope
from evensong.sources.rope import scaled_length, scaled_rope
from evensong.sources.values import number, read_json, token_ids, whole

FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def describe_folder(path: Path) -> ModelDescription:
    """The description that config.json gives; ends of text of generation_config.json count too.

    Raises ConfigError for what would change the result and does not exist here; KeyError, TypeError, ValueError,
    AttributeError and ArithmeticError for values that are missing or of another kind.
    """
    stored = read_json(path / "config.json")
    family = _family(stored)
    config = {**family.defaults, **_text_part(stored, family)}
    _refuse_unsupported(config)
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    num_layers, head_dim = whole(config, "num_hidden_layers"), whole(config, "head_dim", hidden // max(heads, 1))
    kinds = _layer_kinds(config, family, num_layers)
    rotary_dim = int(head_dim * _partial_factor(config))
    ropes = {kind: _rope(config, family, kind, rotary_dim) for kind in sorted(set(kinds))}
    max_positions = whole(config, "max_position_embeddings")
    if not family.max_length_is_scaled:
        max_positions = scaled_length(_rope_parameters(config, FULL), max_positions)
    bias = bool(config.get("attention_bias", False))
    bos = token_ids(config.get("bos_token_id"))
    return ModelDescription(
        family=family.name,
        vocab_size=whole(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=whole(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rms_norm_eps=float(config["rms_norm_eps"]),
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        layer_windows=tuple(whole(config, "sliding_window") if kind == SLIDING else None for kind in kinds),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_eos_token_ids(config, path),
        bos_token_id=bos[0] if bos else None,
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        activation=_activation(config, family),
        norm_weight_offset=family.norm_weight_offset,
        embedding_scale=hidden**0.5 if family.scales_embedding else 1.0,
        query_pre_attn_scalar=number(config, "query_pre_attn_scalar") if "query_pre_attn_scalar" in config else None,
    )


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    return family_of_architecture(str(names[0]) if isinstance(names, list) and names else "?")


def _text_part(stored: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What config.json says of the text model, without nulls; of a model with images, its ends of text count too."""
    config = {key: value for key, value in stored.items() if value is not None}
    text = config.get("text_config") if family.text_config else None
    if text is None:
        return config
    eos = token_ids(config.get("eos_token_id")) + token_ids(text.get("eos_token_id"))
    return {**config, **{key: value for key, value in text.items() if value is not None}, "eos_token_id": eos}


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise ConfigError("checkpoints with a quantization_config are not supported; use GGUF")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            raise ConfigError(f"{name} is not supported")
    if config.get("use_bidirectional_attention"):
        raise ConfigError("attention in both directions is not supported")


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act")
    if name is None:
        return family.activation
    if str(name) not in _ACTIVATIONS:
        raise ConfigError(f"the activation {name!r:.80} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[str(name)]


def _layer_kinds(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    """Full or sliding attention, one entry a layer."""
    if num_layers > 10_000:
        raise ValueError(f"num_hidden_layers is {num_layers}")
    given = config.get("layer_types")
    if given is None or family.slides is never:
        window = bool(config.get("sliding_window"))
        return [SLIDING if window and family.slides(layer, config) else FULL for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not set(given) <= {FULL, SLIDING}:
        raise ConfigError(f"layer_types {given!r:.80} is not supported; supported: one of {FULL}, {SLIDING} a layer")
    return given


def _rope_parameters(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What config.json says of the rotary embedding of one kind of layer, in the old spelling or the new."""
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get(kind, parameters)
    scaling = {} if "rope_local_base_freq" in config and kind == SLIDING else config.get("rope_scaling") or {}
    outside = {key: config[key] for key in ("original_max_position_embeddings",) if key in config}
    return {**scaling, **parameters, **outside}


def _partial_factor(config: Mapping[str, Any]) -> float:
    """The share of a head's components that are rotated."""
    factor = number(_rope_parameters(config, FULL), "partial_rotary_factor", number(config, "partial_rotary_factor", 1))
    if not 0 < factor <= 1:
        raise ValueError(f"partial_rotary_factor is {factor}")
    return factor


def _rope(config: Mapping[str, Any], family: Family, kind: str, rotary_dim: int) -> Rope:
    parameters = _rope_parameters(config, kind)
    theta = number(config, "rope_theta", 10000.0)
    if kind == SLIDING and family.local_theta is not None:
        theta = number(config, "rope_local_base_freq", family.local_theta)
    theta = number(parameters, "rope_theta", theta)
    return scaled_rope(theta, rotary_dim, parameters, whole(config, "max_position_embeddings"))


def _eos_token_ids(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    eos = token_ids(config.get("eos_token_id"))
    generation = path / "generation_config.json"
    if generation.is_file():
        eos += token_ids(read_json(generation).get("eos_token_id"))
    return tuple(dict.fromkeys(eos))
