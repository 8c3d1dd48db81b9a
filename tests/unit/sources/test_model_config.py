"""Model descriptions from both kinds of source, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evensong.protocol.errors import ConfigError
from evensong.sources.model_config import load_model_description
from evensong.sources.model_description import ModelDescription, Rope
from evensong.sources.resolve import ModelSource
from tests.unit.sources.files import CONFIG, VOCAB_SIZE, tiny_folder, tiny_gguf

TINY = ModelDescription(
    family="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    rms_norm_eps=float(np.float32(1e-5)),
    layer_ropes=(Rope(10000.0), Rope(10000.0)),
    layer_windows=(None, None),
    max_position_embeddings=128,
    tie_word_embeddings=True,
    torch_dtype="float32",
    eos_token_ids=(2,),
    bos_token_id=1,
)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def test_demo(demo_model: Path) -> None:
    model = load_model_description(ModelSource("gguf", demo_model, "demo"))
    assert (model.family, model.num_layers, model.hidden_size, model.vocab_size) == ("llama", 30, 576, 49152)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size) == (9, 3, 64, 1536)
    assert model.layer_ropes == (Rope(100000.0),) * 30 and model.layer_windows == (None,) * 30
    assert (model.max_position_embeddings, model.tie_word_embeddings) == (8192, True)
    assert (model.torch_dtype, model.eos_token_ids, model.bos_token_id) == ("bfloat16", (2,), 1)
    assert math.isclose(model.rms_norm_eps, 1e-5, rel_tol=1e-6)


def test_gguf_and_folder_describe_the_same_model(tmp_path: Path) -> None:
    assert load_model_description(tiny_gguf(tmp_path / "tiny.gguf")) == TINY
    expected = dataclasses.replace(TINY, rms_norm_eps=1e-5)
    assert load_model_description(tiny_folder(tmp_path / "m")) == expected


def test_an_output_head_of_its_own_is_seen(tmp_path: Path) -> None:
    assert not load_model_description(tiny_gguf(tmp_path / "tiny.gguf", tied=False)).tie_word_embeddings


def folder(tmp_path: Path, **config: Any) -> ModelDescription:
    return load_model_description(tiny_folder(tmp_path / "m", config))


def test_what_a_configuration_may_leave_out(tmp_path: Path) -> None:
    model = folder(
        tmp_path, num_key_value_heads=None, rope_theta=None, torch_dtype=None, bos_token_id=None, eos_token_id=None
    )
    assert (model.num_kv_heads, model.layer_ropes[0].theta, model.torch_dtype) == (4, 10000.0, "float32")
    assert (model.bos_token_id, model.eos_token_ids) == (None, ())


def test_newer_and_older_spellings(tmp_path: Path) -> None:
    model = folder(tmp_path, torch_dtype=None, dtype="bfloat16", rope_theta=None, rope_parameters={"rope_theta": 5e5})
    assert (model.torch_dtype, model.layer_ropes[0].theta) == ("bfloat16", 5e5)
    model = folder(tmp_path, torch_dtype="torch.float16", head_dim=32, attention_bias=True, mlp_bias=True)
    assert (model.torch_dtype, model.head_dim, model.mlp_bias) == ("float16", 32, True)
    assert model.qkv_bias and model.output_bias


def test_mistral_without_a_window(tmp_path: Path) -> None:
    assert folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).family == "mistral"


def test_a_window_that_hides_nothing_is_none(tmp_path: Path) -> None:
    model = folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128)
    assert model.layer_windows == (None, None)
    model = folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=127)
    assert model.layer_windows == (127, 127)


def test_gemma3_in_the_spellings_of_its_files(tmp_path: Path) -> None:
    """Most of it left out, as in files of the older spelling; and the text part of a model with images."""
    text = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "sliding_window": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "eos_token_id": 1,
    }
    older = folder(tmp_path, **{**dict.fromkeys(CONFIG), **text, "architectures": ["Gemma3ForCausalLM"]})
    assert older.layer_windows == (32,) * 5 + (None, 32)
    assert older.layer_ropes == (Rope(10000.0),) * 5 + (Rope(1e6, (8.0,) * 128), Rope(10000.0))
    assert (older.num_heads, older.num_kv_heads, older.head_dim) == (8, 4, 256)
    assert (older.norm_weight_offset, older.embedding_scale, older.query_pre_attn_scalar) == (1.0, 8.0, 256.0)
    assert older.activation == "gelu_tanh" and older.tie_word_embeddings and older.max_position_embeddings == 131072
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    images = folder(tmp_path, **{**dict.fromkeys(CONFIG), **outer})
    assert images.eos_token_ids == (1, 106) and images.layer_windows == older.layer_windows
    assert images.layer_ropes == older.layer_ropes


def test_rope_scaling(tmp_path: Path) -> None:
    model = folder(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert model.layer_ropes == (Rope(10000.0, (2.0,) * 8),) * 2 and model.max_position_embeddings == 256
    model = folder(tmp_path, rope_scaling=LLAMA3)
    factors = model.layer_ropes[0].factors
    # Waves shorter than 64 / 4 positions stay, those longer than 64 are stretched by 8.
    assert factors[0] == 1 and factors[-1] == 8 and list(factors) == sorted(factors)
    assert any(1 < factor < 8 for factor in factors) and model.max_position_embeddings == 128


def test_generation_config_adds_ends_of_text(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m", {"eos_token_id": [2, 0]})
    (source.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert load_model_description(source).eos_token_ids == (2, 0, 5)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoX.*supported: Llama"),
        ({"architectures": ["llama"]}, "'llama' is not supported"),
        ({"architectures": None}, "supported"),
        ({"architectures": "LlamaForCausalLM"}, "supported"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "window of -1"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1.0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": float("nan")}}, "low_freq_factor nan"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor of inf"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "not a number"),
        ({"rope_scaling": [1]}, "cannot be used"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*supported: linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "cannot be used"),
        ({"rope_theta": 0.0, "rope_scaling": LLAMA3}, "cannot be used"),
        ({"rope_theta": -1.0, "rope_scaling": LLAMA3}, "cannot be used"),
        ({"rope_theta": float("nan"), "rope_scaling": YARN}, "cannot be used"),
        ({"head_dim": 2**31, "rope_scaling": YARN}, "rotated components"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "1 rope factors"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [0.0] * 8}}, "not a positive number"),
        ({"rope_scaling": {**LONGROPE, "long_factor": "x"}}, "not a list of numbers"),
        ({"rope_scaling": {**LONGROPE, "attention_factor": -1}}, "rotated components by -1"),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 0}}, "embeddings is 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.2}, "3 rotated"),
        ({"partial_rotary_factor": 0.05}, "rotates 0 of 16"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size -64"),
        ({"hidden_size": 64.5}, "64.5"),
        ({"hidden_size": "64"}, "'64'"),
        ({"hidden_size": True}, "True"),
        ({"num_attention_heads": 0}, "num_heads 0"),
        ({"num_attention_heads": [4]}, "not a whole number"),
        ({"num_key_value_heads": 3}, "4 heads.*3 KV"),
        ({"num_key_value_heads": -2}, "num_kv_heads -2"),
        ({"head_dim": 15}, "heads of 15"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_layers 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "small"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"torch_dtype": "float8"}, "float8"),
        ({"eos_token_id": VOCAB_SIZE}, f"token {VOCAB_SIZE}"),
        ({"eos_token_id": [-1]}, "token -1"),
        ({"eos_token_id": "2"}, "token ids"),
        ({"bos_token_id": 10**9}, "token 1000000000"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_configurations(tmp_path: Path, config: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        folder(tmp_path, **config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"], ids=lambda b: str(b)[:12])
def test_a_damaged_config_json(tmp_path: Path, content: bytes) -> None:
    source = tiny_folder(tmp_path / "m")
    (source.path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_description(source)


def test_tokens_that_are_marked_as_absent(tmp_path: Path) -> None:
    source = tiny_gguf(
        tmp_path / "t.gguf", {"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.eot_token_id": 0}
    )
    model = load_model_description(source)
    assert (model.bos_token_id, model.eos_token_ids) == (None, (2, 0))


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"general.architecture": "qwen3moe"}, "'qwen3moe' is not supported"),
        ({"general.architecture": "LlamaForCausalLM"}, "not supported"),
        ({"llama.embedding_length": None}, "embedding_length is missing"),
        ({"llama.attention.head_count": [4, 4]}, "not a whole number"),
        ({"llama.attention.head_count": "four"}, "not a whole number"),
        ({"llama.attention.head_count": 0}, "num_heads 0"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "cannot be used"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta"),
        ({"llama.rope.scaling.type": "yarn"}, "factor is missing"),
        ({"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0}, "'odd'"),
        ({"llama.rope.scaling.factor": "x"}, "not a number"),
        ({"llama.rope.dimension_count": 8}, "part of a head"),
        ({"llama.attention.value_length": 8}, "differ in length"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding window"),
        ({"split.count": 3}, "split"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "token 1000000"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "token ids"),
        ({"tokenizer.ggml.tokens": ["t"] * (VOCAB_SIZE + 1)}, "tokens and"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_gguf_metadata(tmp_path: Path, metadata: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load_model_description(tiny_gguf(tmp_path / "t.gguf", metadata))
    assert "\n" not in str(caught.value)


def test_rope_scaling_in_gguf(tmp_path: Path) -> None:
    def described(metadata: dict[str, Any], **extra: np.ndarray[Any, Any]) -> tuple[Rope, int]:
        tensors = {f"{name}.weight": values for name, values in extra.items()}
        model = load_model_description(tiny_gguf(tmp_path / "t.gguf", metadata, extra=tensors))
        assert len(set(model.layer_ropes)) == 1
        return model.layer_ropes[0], model.max_position_embeddings

    linear = (Rope(10000.0, (2.0,) * 8), 256)
    assert described({"llama.rope.scale_linear": 2.0}) == linear
    assert described({"llama.rope.scaling.factor": 2.0}) == linear
    assert described({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}) == linear
    assert described({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}) == (Rope(10000.0), 128)
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    assert described({}, rope_freqs=factors) == (Rope(10000.0, tuple(factors.tolist())), 128)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    rope, length = described({f"llama.rope.scaling.{name}": value for name, value in yarn.items()})
    assert length == 256 and rope.factors[0] == 1 and rope.factors[-1] == 4 and rope.magnitude > 1
    long = {"llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.attn_factor": 1.25}
    assert described(long, rope_factors_long=factors * 2, rope_factors_short=factors) == (
        Rope(10000.0, tuple(factors.tolist()), tuple((factors * 2).tolist()), 64, 1.25),
        128,
    )


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.zeros(8, np.float32), np.ones(8, np.float16)])
def test_rope_factors_that_cannot_be(tmp_path: Path, factors: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="rope.fac|rope_freqs"):
        load_model_description(tiny_gguf(tmp_path / "t.gguf", extra={"rope_freqs.weight": factors}))


# What the configurations of well-known models say beyond sizes, and how many positions, windows and rotated components
# that makes with 4 heads of 16 over two layers.
KNOWN: dict[str, tuple[dict[str, Any], tuple[int, tuple[int | None, ...], int]]] = {
    "Llama 3.1": (
        {
            "rope_theta": 500000.0,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
            "max_position_embeddings": 131072,
        },
        (131072, (None, None), 16),
    ),
    "Mistral 7B 0.1": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 32768},
        (32768, (4096, 4096), 16),
    ),
    "Qwen2.5": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": 1,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        (131072, (None, None), 16),
    ),
    "Phi-3-mini-4k": (
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047, "max_position_embeddings": 4096},
        (4096, (2047, 2047), 16),
    ),
    "Phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "sliding_window": 262144,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
        },
        (131072, (None, None), 12),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_configurations_of_well_known_models(tmp_path: Path, name: str) -> None:
    config, expected = KNOWN[name]
    model = folder(tmp_path, **config)
    assert (model.max_position_embeddings, model.layer_windows, model.rotary_dim) == expected


def test_longrope_magnitude_and_choice(tmp_path: Path) -> None:
    rope = folder(tmp_path, **KNOWN["Phi-4-mini"][0]).layer_ropes[0]
    assert math.isclose(rope.magnitude, math.sqrt(1 + math.log(32) / math.log(4096)))
    assert (rope.factors_for(4096), rope.factors_for(4097)) == ((1.0,) * 6, (2.0,) * 6)
    assert str(rope) != str(Rope(10000.0)) == "10000.0"


def test_windows_by_family(tmp_path: Path) -> None:
    """Only what the family's own code does with the same words."""
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
    assert folder(tmp_path, **qwen).layer_windows == (None, None)
    assert folder(tmp_path, **qwen, use_sliding_window=True).layer_windows == (None, 64)
    assert folder(tmp_path, **{**qwen, "max_window_layers": 2}, use_sliding_window=True).layer_windows == (None, None)
    assert folder(tmp_path, sliding_window=64).layer_windows == (None, None)
    kinds = ["full_attention", "sliding_attention"]
    assert folder(tmp_path, sliding_window=64, layer_types=kinds).layer_windows == (None, None)
    assert folder(tmp_path, **qwen, layer_types=kinds).layer_windows == (None, 64)
    with pytest.raises(ConfigError, match="sliding_window is missing"):
        folder(tmp_path, **{**qwen, "sliding_window": None}, layer_types=kinds)
    with pytest.raises(ConfigError, match="layer_types"):
        folder(tmp_path, **{**qwen, "sliding_window": None}, layer_types=["full_attention", "linear_attention"])
