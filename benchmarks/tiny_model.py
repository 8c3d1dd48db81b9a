"""Writes a model of negligible compute: what an engine takes for it is the cost of the engine alone.

    python benchmarks/tiny_model.py FOLDER

A Llama of 2 layers, hidden size 64 and a vocabulary of 2,048, in bf16, that evensong and vLLM load. It is the same on
every machine: the weights come from one seed, the tokenizer's merges from a rule. What it says is noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from pathlib import Path

import numpy as np
import tokenizers

VOCAB_SIZE = 2048
HIDDEN, INTERMEDIATE, NUM_LAYERS = 64, 128, 2
MAX_POSITIONS = 8192
SPECIAL = {"eos_token": "<|end|>", "bos_token": "<|start|>"}
SCALE = 0.02
SEED = 0


def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE: each byte, pairs of letters, a space with one letter or a pair, then triples of letters."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    space = "\u0120"  # how byte-level vocabularies write a space
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    rule = itertools.chain(
        itertools.product(letters, repeat=2),
        ((space, part) for part in (*letters, *pairs)),
        itertools.product(pairs, letters),
    )
    merges = list(itertools.islice(rule, VOCAB_SIZE - len(SPECIAL) - len(symbols)))
    words = [*symbols, *(first + second for first, second in merges)]
    model = tokenizers.models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL.values()))
    return made


def weights() -> dict[str, np.ndarray]:
    """The tensors by name, as the bits of bfloat16 in uint16."""
    generator = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int) -> np.ndarray:
        return _bf16(SCALE * generator.standard_normal((rows, columns), dtype=np.float32))

    ones = _bf16(np.ones(HIDDEN, dtype=np.float32))
    named = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN), "model.norm.weight": ones}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        named |= {f"{prefix}{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        named |= {f"{prefix}self_attn.{name}_proj.weight": matrix(HIDDEN, HIDDEN) for name in "qkvo"}
        named |= {f"{prefix}mlp.{name}_proj.weight": matrix(INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        named[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return named


def _bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, without rounding: noise needs none."""
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))


def config() -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": VOCAB_SIZE - 2,
        "bos_token_id": VOCAB_SIZE - 1,
    }


def write_safetensors(path: Path, named: dict[str, np.ndarray]) -> None:
    """The file format: the header's length, the header in JSON, the tensors' bytes.

    Written here since numpy, and with it the library's door for numpy, has no bfloat16. Source:
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, bits in named.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [begin, begin + bits.nbytes]}
        begin += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(bits.tobytes() for bits in named.values())


def write_tiny_model(folder: Path) -> Path:
    """Writes the model's folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", weights())
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    extra = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(extra, indent=1))
    return folder


def main() -> int:
    """Writes it where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(write_tiny_model(parser.parse_args().folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
