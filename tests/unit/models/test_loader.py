"""The loader names what is missing, surplus or mis-shaped, reports progress, and shares an embedding's values."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evensong.distributed.split import whole_share
from evensong.models.base import CausalLM
from evensong.models.check import check_model
from evensong.models.loader import TensorReader
from evensong.models.registry import model_class
from evensong.protocol.errors import ConfigError
from evensong.sources.families import FAMILIES
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import open_weights
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama
from tests.unit.models.stepping import Stepper, load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", TinyLlama())


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; __ stands for a dot."""
    file = str(folder / "model.safetensors")
    state = load_file(file)
    for name, value in tensors.items():
        name = name.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    save_file(state, file)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(folder), "float32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_tensor(folder: Path) -> None:
    change(folder, model__layers__1__mlp__up_proj__weight=None)
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_a_mis_shaped_tensor(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 63))
    message = refusal(folder)
    assert "model.layers.0.self_attn.k_proj.weight" in message and "[32, 63]" in message and "[32, 64]" in message


def test_a_surplus_tensor(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
    message = refusal(folder)
    assert "1 tensor" in message and "model.layers.0.self_attn.q_norm.weight" in message


def test_progress_is_called_for_each_tensor(folder: Path) -> None:
    source = resolve_model(str(folder))
    weights, calls = open_weights(source), itertools.count(1)
    description = load_model_description(source)
    spans = check_model(description, weights, whole_share(description))
    with TensorReader(weights, spans, lambda: next(calls)) as read:
        for name, wanted in spans.items():
            assert read(name, wanted).shape == weights[name].shape
    assert next(calls) == len(weights) + 1 and read.read == set(weights)


def test_a_tied_head_may_be_stored_as_well(folder: Path) -> None:
    tokens = [1, 2, 3, 40, 5]
    plain = Stepper(load(str(folder), "float32")[0]).run(tokens, 5)
    table = load_file(str(folder / "model.safetensors"))["model.embed_tokens.weight"]
    change(folder, lm_head__weight=table)
    assert torch.equal(Stepper(load(str(folder), "float32")[0]).run(tokens, 5), plain)


def test_kv_specs_follow_the_mode(folder: Path) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        specs = load(str(folder), dtype)[0].kv_specs()
        assert [spec.layer for spec in specs] == [0, 1]
        assert {(s.num_kv_heads, s.head_dim, s.dtype, s.dtype_size) for s in specs} == {(2, 16, dtype, size)}


def test_rotary_tables_follow_the_fitted_length(folder: Path) -> None:
    model = load(str(folder), "float32")[0]
    tokens = list(range(60))
    before = Stepper(model, max_model_len=2048).run(tokens, 60)
    assert torch.equal(Stepper(model, max_model_len=60).run(tokens, 60), before)


def test_every_known_family_has_a_model() -> None:
    for family in FAMILIES:
        made = model_class(family.name)
        assert isinstance(made, type) and issubclass(made, CausalLM), family.name
