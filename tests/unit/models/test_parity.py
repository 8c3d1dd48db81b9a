"""Logits of the demo model against `transformers` on the same weights (other families: test_families.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from evensong.sources.dequant import dequantize
from evensong.sources.model_config import ModelDescription
from evensong.sources.resolve import ModelSource, resolve_model
from evensong.sources.tokenizer import load_tokenizer
from evensong.sources.weights import open_weights
from tests.unit.models.stepping import Stepper, load

TEXT = """When the tide went out, the harbour showed its ribs: chains, old anchors, a bicycle that nobody had asked for.
Marta walked the wall every morning before the market opened, because the light was cheap then and the gulls had not
yet begun their arguments. She counted boats. There had been forty-one in her grandfather's time, and nineteen when she
was a girl; now there were six, and one of those belonged to a dentist who came on Sundays to polish it. Still, the
numbers were useful. A number, her grandfather used to say, is a small room where you can put a thing down and find it
again. In 1987 the ferry stopped. In 1994 the cannery burned, and for a week the whole town smelled of sardines and
paint. She wrote these down as well, in a column of their own, next to the prices of diesel, rope and ice; the pages
were nearly full, and she did not know who would read them."""


def transformers_model(source: ModelSource, description: ModelDescription, stored: torch.dtype) -> Any:
    """A model with tied embeddings in float32, its weights rounded to `stored`."""
    model = transformers.LlamaForCausalLM(llama_config(description)).eval()
    weights = {name: torch.tensor(dequantize(entry)).to(stored).float() for name, entry in open_weights(source).items()}
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not surplus
    model.tie_weights()
    return model


def transformers_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_the_demo_model_over_200_positions(demo_model: Path) -> None:
    source = resolve_model(str(demo_model), progress=False)
    ours, description = load(str(demo_model), "float32")
    theirs = transformers_model(source, description, torch.float32)
    tokens = load_tokenizer(source).encode(TEXT)[:200]
    assert len(tokens) == 200
    difference = largest_difference(Stepper(ours).run(tokens, 64), transformers_logits(theirs, tokens))
    print(f"largest difference of fp32 logits over 200 positions: {difference:.2e}")
    assert difference < 1e-3


def test_bfloat16_is_no_further_from_exact_than_transformers(demo_model: Path) -> None:
    """Exact: the same bfloat16 weights computed in float32. Mean divergence of the next-token distributions."""
    source = resolve_model(str(demo_model), progress=False)
    ours, description = load(str(demo_model), "bfloat16")
    theirs = transformers_model(source, description, torch.bfloat16)
    tokens = load_tokenizer(source).encode(TEXT)[:200]
    exact = transformers_logits(theirs, tokens).log_softmax(-1)
    rounded = transformers_logits(theirs.to(torch.bfloat16), tokens).log_softmax(-1)
    own = Stepper(ours).run(tokens, 64).log_softmax(-1)
    divergence = [float((exact.exp() * (exact - other)).sum(-1).mean()) for other in (own, rounded)]
    print(f"divergence from float32: {divergence[0]:.1e}, transformers in bfloat16 {divergence[1]:.1e}")
    assert 0 < divergence[0] < divergence[1] < 0.01


def llama_config(model: ModelDescription) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.layer_ropes[0].theta},
        tie_word_embeddings=model.tie_word_embeddings,
        attn_implementation="eager",
    )
