"""Small model files for the tests of this package, written by the formats' own libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from evensong.sources.resolve import ModelSource

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġwo r", "l d", "Ġwor ld")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_tokens() -> list[str]:
    """A byte-level vocabulary: special tokens, all bytes, and what MERGES make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


VOCAB_SIZE = len(byte_tokens())


def hf_weights(*, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 weights of a tiny Llama under Hugging Face names."""
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB_SIZE, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The row order in which GGUF files of the Llama family keep q and k: rotary pairs side by side."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(half):
            start = head * 2 * half
            out[start + 2 * pair] = rows[start + pair]
            out[start + 2 * pair + 1] = rows[start + half + pair]
    return out


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def tiny_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    *,
    tied: bool = True,
    dtype: gguf.GGMLQuantizationType | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> ModelSource:
    """A tiny Llama as a GGUF file. `metadata` replaces values by key; a value of None leaves the key out."""
    values: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": byte_tokens(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (VOCAB_SIZE - len(SPECIAL)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    values |= metadata or {}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    for name, array in hf_weights(tied=tied).items():
        if name.endswith("q_proj.weight"):
            array = interleave(array, HEADS)
        elif name.endswith("k_proj.weight"):
            array = interleave(array, KV_HEADS)
        if dtype is not None and array.ndim > 1:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(gguf_name(name), array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", path, "tiny")


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of `byte_tokens`, as a folder's tokenizer.json holds one."""
    vocabulary = {token: index for index, token in enumerate(byte_tokens())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(m.split(" ")) for m in MERGES]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def tiny_folder(path: Path, config: dict[str, Any] | None = None, *, shards: int = 1) -> ModelSource:
    """The same tiny Llama as a folder, in one safetensors file or several with an index."""
    path.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(values))
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE})
    )
    weights = hf_weights()
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return ModelSource("folder", path, "tiny")
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ModelSource("folder", path, "tiny")
