"""Tiny random models on disk: real files, so that everything from sources to logits runs, in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

EOS_TOKEN = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TinyLlama:
    """Sizes of a tiny model of the Llama family. `vocab_size` counts its padding: only 257 ids have a token.

    `window`, if any: the layers of `layers_with_window` have it, and the model is a Mistral.
    """

    vocab_size: int = 272
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 512
    dtype: str = "float32"
    seed: int = 0
    window: int | None = None
    layers_with_window: tuple[int, ...] = (0, 1)

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads


NUM_TOKENS = 257  # one for each byte, and the end
EOS_TOKEN_ID = 256


def write_tiny_llama(folder: Path, model: TinyLlama | None = None) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json into `folder`; returns it."""
    model = model or TinyLlama()
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": True,
        "torch_dtype": model.dtype,
        "eos_token_id": EOS_TOKEN_ID,
    }
    if model.window is not None:
        kinds = ["sliding" if i in model.layers_with_window else "full" for i in range(model.num_layers)]
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": model.window,
            "layer_types": [f"{kind}_attention" for kind in kinds],
        }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS_TOKEN, "chat_template": TEMPLATE}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_weights(model), str(folder / "model.safetensors"))
    return folder


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token for each byte, and one that ends a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN])
    return tokenizer


def _weights(model: TinyLlama) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(model.seed)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator).mul_(scale / columns**0.5)
        return values.to(_DTYPES[model.dtype])

    hidden, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    ones = torch.ones(hidden, dtype=_DTYPES[model.dtype])
    # The scales make a token depend visibly on those before it: attention as strong as the residual stream, and
    # logits spread over several nats.
    weights = {
        "model.embed_tokens.weight": matrix(model.vocab_size, hidden, 3.0),
        "model.norm.weight": ones,
    }
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones.clone(),
            f"{prefix}.post_attention_layernorm.weight": ones.clone(),
            f"{prefix}.self_attn.q_proj.weight": matrix(hidden, hidden, 1.5),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv, hidden, 1.5),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv, hidden, 1.0),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, hidden, 1.0),
            f"{prefix}.mlp.gate_proj.weight": matrix(model.intermediate_size, hidden, 1.0),
            f"{prefix}.mlp.up_proj.weight": matrix(model.intermediate_size, hidden, 1.0),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, model.intermediate_size, 1.0),
        }
    return weights
