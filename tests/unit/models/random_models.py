"""Models of transformers with random weights, written as users get them: a folder, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import save_file

from evensong.testing.tiny_models import byte_tokenizer
from tests.unit.sources.files import interleave

VOCAB_SIZE = 300
# Uneven on purpose: no size is a multiple of another's by accident.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


def random_model(config: transformers.PreTrainedConfig, folder: Path) -> Any:
    """A model of transformers for `config`, and the same in `folder` as config.json, safetensors, tokenizer.json."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(stored_weights(model), str(folder / "model.safetensors"))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def stored_weights(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds: a shared head is stored once."""
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[num_tokens, vocab] float32 by transformers."""
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return result


def write_gguf(
    model: Any, architecture: str, path: Path, extra: dict[str, torch.Tensor] | None = None, **metadata: Any
) -> Path:
    """The model as a GGUF file, its tensors named by the format's own package. `metadata`: further keys below the
    architecture, with _ for the dots."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for name, value in metadata.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}" for index in range(VOCAB_SIZE)])
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, value in stored_weights(model).items():
        values = value.numpy()
        if architecture == "llama" and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        elif architecture == "llama" and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        elif architecture == "gemma3" and "norm" in name:
            values = values + 1
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), values)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
