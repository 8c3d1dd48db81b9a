"""Every family against transformers, in float32, on small random weights; as a GGUF file too; and in any chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from evensong.kernels.dispatch import OPS
from evensong.kernels.mode import BFLOAT16, FLOAT16, FLOAT32, WIDENED, NumericMode
from evensong.sources.families import FAMILIES
from evensong.testing.tiny_models import byte_tokenizer
from evensong.worker.device import Device
from tests.unit.models.random_models import SMALL, VOCAB_SIZE, logits, random_model, write_gguf
from tests.unit.models.stepping import Stepper, load

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.5, 6.0, 9.0],
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 100}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
FULL, SLIDING = "full_attention", "sliding_attention"
# A configuration of each kind that changes what is computed, by family.
CONFIGS: dict[str, dict[str, Callable[[], transformers.PreTrainedConfig]]] = {
    "llama": {
        "biases": lambda: transformers.LlamaConfig(
            **SMALL, head_dim=8, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
        ),
        "tied, wide heads": lambda: transformers.LlamaConfig(
            **SMALL,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        "llama3 scaling": lambda: transformers.LlamaConfig(**SMALL, head_dim=16, rope_parameters=LLAMA3),
        "linear scaling": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LINEAR),
    },
    "mistral": {
        "no window": lambda: transformers.MistralConfig(**SMALL, head_dim=32, sliding_window=None, rms_norm_eps=1e-6),
        "a window": lambda: transformers.MistralConfig(**SMALL, head_dim=32, sliding_window=70, rms_norm_eps=1e-6),
    },
    "qwen2": {
        "untied": lambda: transformers.Qwen2Config(
            **SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
        ),
        "tied, yarn": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True, rope_parameters=YARN),
        "windows in upper layers": lambda: transformers.Qwen2Config(
            **SMALL, use_sliding_window=True, sliding_window=130, max_window_layers=1
        ),
    },
    "qwen3": {
        "untied": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
        "tied, biases": lambda: transformers.Qwen3Config(
            **SMALL, head_dim=8, tie_word_embeddings=True, attention_bias=True
        ),
    },
    "gemma3": {
        "windows and scaling": lambda: transformers.Gemma3TextConfig(
            **{**SMALL, "num_hidden_layers": 7},
            head_dim=16,
            sliding_window=50,
            query_pre_attn_scalar=16,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        # Five layers with a window, two without: groups of two, one of them short.
        "groups of two": lambda: transformers.Gemma3TextConfig(
            **{**SMALL, "num_hidden_layers": 7},
            head_dim=16,
            sliding_window=130,
            query_pre_attn_scalar=24,
            layer_types=[FULL if layer in (2, 6) else SLIDING for layer in range(7)],
        ),
    },
    "phi3": {
        "plain": lambda: transformers.Phi3Config(**SMALL),
        "longrope, part of a head": lambda: transformers.Phi3Config(
            **{**SMALL, "hidden_size": 96},
            tie_word_embeddings=True,
            rope_parameters=LONGROPE,
            original_max_position_embeddings=128,
        ),
    },
}
CASES = [(family, case) for family, cases in CONFIGS.items() for case in cases]
# Further metadata of a GGUF file, where it says more than sizes.
GGUF = {
    ("llama", "llama3 scaling"): {},
    ("llama", "linear scaling"): {"rope__scaling__type": "linear", "rope__scaling__factor": 2.5},
    ("qwen2", "untied"): {},
    ("qwen2", "tied, yarn"): {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 100,
    },
    ("qwen3", "untied"): {},
    ("gemma3", "windows and scaling"): {
        "attention__sliding_window": 50,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 8.0,
    },
    ("phi3", "plain"): {},
    ("phi3", "longrope, part of a head"): {
        "rope__dimension_count": 12,
        "rope__scaling__original_context_length": 128,
        "rope__scaling__attn_factor": float(np.sqrt(1 + np.log(400 / 128) / np.log(128))),
    },
}


def tokens_of(length: int) -> list[int]:
    return np.random.default_rng(5).integers(0, VOCAB_SIZE, length).tolist()


def test_every_family_is_here() -> None:
    assert set(CONFIGS) == {family.name for family in FAMILIES}
    assert {family for family, _ in GGUF} == {family.name for family in FAMILIES if family.gguf}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits_against_transformers(family: str, case: str, tmp_path: Path) -> None:
    theirs = random_model(CONFIGS[family][case](), tmp_path)
    ours, description = load(str(tmp_path), "float32")
    assert description.family == family
    tokens = tokens_of(290)
    expected = logits(theirs, tokens)
    assert expected.abs().max() > 0.5
    assert (Stepper(ours).run(tokens, 100) - expected).abs().max() < 1e-3


def test_the_text_part_of_a_model_with_images(tmp_path: Path) -> None:
    text = CONFIGS["gemma3"]["windows and scaling"]()
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    theirs.save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokens = tokens_of(200)
    expected = logits(theirs, tokens)
    assert expected.abs().max() > 0.5
    assert (Stepper(load(str(tmp_path), "float32")[0]).run(tokens, 100) - expected).abs().max() < 1e-3


def test_longrope_goes_by_the_fitted_length(tmp_path: Path) -> None:
    """Up to the original length a model computes with one set of factors, beyond with the other, from token one on."""
    theirs = random_model(CONFIGS["phi3"]["longrope, part of a head"](), tmp_path)
    ours = load(str(tmp_path), "float32")[0]
    tokens = tokens_of(129)
    long = Stepper(ours).run(tokens, 129)
    assert (long - logits(theirs, tokens)).abs().max() < 1e-3
    short = Stepper(ours, max_model_len=128).run(tokens[:128], 128)
    assert (short - logits(theirs, tokens[:128])).abs().max() < 1e-3
    assert (short - long[:128]).abs().max() > 0.01


@pytest.mark.parametrize(("family", "case"), list(GGUF))
def test_a_gguf_file_gives_the_same_bits_as_the_folder(family: str, case: str, tmp_path: Path) -> None:
    theirs = random_model(CONFIGS[family][case](), tmp_path / "folder")
    extra = {}
    if case == "llama3 scaling":
        rope = load(str(tmp_path / "folder"), "float32")[1].layer_ropes[0]
        extra = {"rope_freqs.weight": torch.tensor(rope.factors)}
    elif "longrope" in case:
        extra = {f"rope_factors_{name}.weight": torch.tensor(LONGROPE[f"{name}_factor"]) for name in ("short", "long")}
    architecture = next(known.gguf for known in FAMILIES if known.name == family)
    assert architecture is not None
    file = write_gguf(theirs, architecture, tmp_path / "model.gguf", extra, **GGUF[family, case])
    folder_model, stored = load(str(tmp_path / "folder"), "float32")
    file_model, described = load(str(file), "float32")
    assert (described.max_position_embeddings, described.rotary_dim) == (
        stored.max_position_embeddings,
        stored.rotary_dim,
    )
    tokens = tokens_of(200)
    ours, expected = Stepper(file_model).run(tokens, 200), Stepper(folder_model).run(tokens, 200)
    exact = extra == {} or case == "llama3 scaling"
    assert torch.equal(ours, expected) if exact else (ours - expected).abs().max() < 1e-3


# How a family is computed: by torch in a mode, or natively in a run dtype.
MODES: dict[str, NumericMode | str] = {
    "torch, float32": FLOAT32,
    "torch, widened": WIDENED,
    "torch, bfloat16": BFLOAT16,
    "native, float32": "float32",
    "native, bfloat16": "bfloat16",
}


def load_in(mode: str, folder: Path) -> Device:
    asked = MODES[mode]
    if isinstance(asked, str):
        return load(str(folder), asked)[0]
    return load(str(folder), "float32", asked, OPS["cpu"])[0]


@pytest.mark.parametrize("mode", ["torch, float32", "torch, widened", "native, float32", "native, bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
def test_chunks_and_neighbours_change_no_bit(family: str, mode: str, tmp_path: Path) -> None:
    random_model(list(CONFIGS[family].values())[-1](), tmp_path)
    model = load_in(mode, tmp_path)
    tokens = tokens_of(200)
    whole = Stepper(model).run(tokens, 200)
    assert whole.isfinite().all()
    for chunk in (7, 64):
        assert torch.equal(Stepper(model, seed=chunk).run(tokens, chunk), whole)
    stepper = Stepper(model, block_size=5)
    sequences = [stepper.sequence(tokens[: 180 - 9 * i]) for i in range(6)]
    stepper.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    stepper.step([(sequence, 1) for sequence in sequences])
    for sequence in sequences:
        assert torch.equal(sequence.all_logits(), whole[: len(sequence.tokens)])


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("mistral", "a window"),
        ("qwen2", "windows in upper layers"),
        ("gemma3", "windows and scaling"),
        ("gemma3", "groups of two"),
    ],
)
def test_a_window_changes_no_bit_in_any_chunks_or_after_a_hit(
    family: str, case: str, mode: str, tmp_path: Path
) -> None:
    """Blocks that were given back hold NaN: in chunks, token by token, on another's prefix, computed a second time."""
    random_model(CONFIGS[family][case](), tmp_path)
    model = load_in(mode, tmp_path)
    tokens = tokens_of(280)
    whole = Stepper(model).run(tokens, 280)
    assert whole.isfinite().all()
    for chunk, block_size in ((7, 16), (100, 5)):
        assert torch.equal(Stepper(model, block_size=block_size, seed=chunk).run(tokens, chunk), whole)
    stepper = Stepper(model, block_size=8)
    one, other = stepper.sequence(tokens), stepper.sequence(tokens[:203])
    stepper.step([(one, 190), (other, 61)])
    stepper.step([(other, 141)])
    while one.computed < 240:
        stepper.step([(one, 1), *([(other, 1)] if other.computed < 203 else [])])
    # On what the other one has left, while that one goes on; and from the start again, as after a preemption.
    hit, again = stepper.sharing(one, tokens), stepper.sequence(tokens)
    assert hit.computed == 240
    stepper.step([(again, 250), (hit, 40), (one, 40)])
    stepper.step([(again, 30)])
    assert torch.equal(other.all_logits(), whole[:203])
    assert torch.equal(hit.all_logits(), whole[240:])
    for sequence in (one, again):
        assert torch.equal(sequence.all_logits(), whole)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_the_ops_of_a_device_in_float16(family: str, tmp_path: Path) -> None:
    """What CUDA runs for `--dtype float16`, here on the CPU: close to the same weights computed in float32."""
    random_model(list(CONFIGS[family].values())[-1](), tmp_path)
    half, wide = FLOAT16, NumericMode("float16 in float32", "float16", "float32", "float32")
    tokens = tokens_of(150)
    ours, exact = (
        Stepper(load(str(tmp_path), "float32", mode, OPS["cuda"])[0]).run(tokens, 100) for mode in (half, wide)
    )
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() / exact.norm() < 0.02
