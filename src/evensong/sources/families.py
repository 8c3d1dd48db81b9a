"""Model families: one line each says how a family's files are read and which class of models/ runs it.

Free of torch: front ends read descriptions too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.model_description import Activation

# (layer, values of config.json; none of GGUF) -> whether the layer has the model's sliding window.
Slides = Callable[[int, Mapping[str, Any]], bool]


def every_layer(layer: int, config: Mapping[str, Any]) -> bool:
    """Mistral and Phi-3: all layers have the window."""
    return True


def switched_on(layer: int, config: Mapping[str, Any]) -> bool:
    """Qwen: upper layers, and only where the configuration switches windows on."""
    return bool(config.get("use_sliding_window")) and layer >= int(config.get("max_window_layers", 0))


def all_but_each_sixth(layer: int, config: Mapping[str, Any]) -> bool:
    """Gemma 3: five layers with the window, then one without; older configurations name the length of that pattern."""
    return (layer + 1) % max(int(config.get("sliding_window_pattern", 6)), 1) != 0


def never(layer: int, config: Mapping[str, Any]) -> bool:
    """Llama: a window in its configuration means nothing."""
    return False


@dataclass(frozen=True)
class Family:
    """How one family's files are read.

    `model`: module and class below evensong.models. `architectures`: names in config.json. `gguf`: the architecture in
    GGUF files, if they are read; `gguf_names` are tensor names that differ from Llama's, by the layer's GGUF name;
    `gguf_pairs`: q and k rows hold rotary pairs side by side. `defaults`: what a config.json may leave out and
    transformers fills in. `qkv_bias`: always biased, whatever the configuration says. `local_theta`: the rotary base of
    layers with a window, where it is another one. `scales_embedding`: by the root of the hidden size.
    `max_length_is_scaled`: max_position_embeddings counts linear rope scaling in already.
    `text_config`: config.json may be that of a model with images; only the text part, in its text_config, is read.
    `gguf_query_scalars`: query_pre_attn_scalar by number of layers, where it is not head_dim; GGUF files do not say it.
    """

    name: str
    model: str
    architectures: tuple[str, ...]
    gguf: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_pairs: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    slides: Slides = never
    qkv_bias: bool = False
    activation: Activation = "silu"
    local_theta: float | None = None
    norm_weight_offset: float = 0.0
    scales_embedding: bool = False
    max_length_is_scaled: bool = False
    text_config: bool = False
    gguf_query_scalars: Mapping[int, float] = field(default_factory=dict)


FAMILIES: tuple[Family, ...] = (
    Family("llama", "llama.LlamaForCausalLM", ("LlamaForCausalLM",), gguf="llama", gguf_pairs=True),
    Family("mistral", "llama.LlamaForCausalLM", ("MistralForCausalLM",), slides=every_layer),
    Family("qwen2", "qwen2.Qwen2ForCausalLM", ("Qwen2ForCausalLM",), gguf="qwen2", qkv_bias=True, slides=switched_on),
    Family(
        "qwen3",
        "qwen3.Qwen3ForCausalLM",
        ("Qwen3ForCausalLM",),
        gguf="qwen3",
        defaults={"head_dim": 128},
        slides=switched_on,
    ),
    Family(
        "phi3",
        "phi3.Phi3ForCausalLM",
        ("Phi3ForCausalLM",),
        gguf="phi3",
        gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        slides=every_layer,
    ),
    Family(
        "gemma3",
        "gemma3.Gemma3ForCausalLM",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        gguf="gemma3",
        gguf_names={
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        slides=all_but_each_sixth,
        activation="gelu_tanh",
        local_theta=10000.0,
        norm_weight_offset=1.0,
        scales_embedding=True,
        max_length_is_scaled=True,
        text_config=True,
        gguf_query_scalars={62: 168.0},
    ),
)


def family_named(name: str) -> Family:
    """The family of a ModelDescription."""
    return next(family for family in FAMILIES if family.name == name)


def family_of_architecture(name: str) -> Family:
    """The family of a name in config.json's `architectures`. Raises ConfigError naming what is supported."""
    for family in FAMILIES:
        if name in family.architectures:
            return family
    known = ", ".join(known for family in FAMILIES for known in family.architectures)
    raise ConfigError(f"the architecture {name!r:.80} is not supported; supported: {known}")


def family_of_gguf(name: str) -> Family:
    """The family of a GGUF file's `general.architecture`. Raises ConfigError naming what is supported."""
    for family in FAMILIES:
        if name == family.gguf:
            return family
    known = ", ".join(family.gguf for family in FAMILIES if family.gguf)
    raise ConfigError(f"the GGUF architecture {name!r:.80} is not supported; supported: {known}")
