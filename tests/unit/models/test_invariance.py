"""One sequence, one result: alone or among others, in any chunks, in any blocks, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evensong.kernels.dispatch import OPS
from evensong.kernels.linear import one_thread
from evensong.kernels.mode import NumericMode
from evensong.models.base import CausalLM
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama
from tests.unit.models.stepping import Stepper, load

WIDENED = NumericMode("bfloat16-widened", torch.bfloat16, torch.float32, torch.bfloat16)
NATIVE = NumericMode("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16)
FLOAT32 = NumericMode("float32", torch.float32, torch.float32, torch.float32)
# Groups of 3 and of 1, one key head alone, sizes that fill no whole vector.
MODELS = {
    "widened": (TinyLlama(hidden_size=72, num_heads=9, num_kv_heads=3, intermediate_size=100), WIDENED),
    "float32": (TinyLlama(hidden_size=64, num_heads=4, num_kv_heads=1), FLOAT32),
    "one head": (TinyLlama(hidden_size=32, num_heads=1, num_kv_heads=1), FLOAT32),
    "native": (TinyLlama(hidden_size=64, num_heads=4, num_kv_heads=2), NATIVE),
    "hybrid": (TinyLlama(num_layers=3, num_kv_heads=1, window=50, layers_with_window=(0, 2)), NATIVE),
}


def tokens_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CausalLM]:
    sizes, mode = MODELS[request.param]
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), sizes)
    # oneDNN packs bfloat16 weights on processors with AVX-512 only; plain products compute in bfloat16 anywhere.
    packs = mode.compute != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    yield load(str(folder), "float32", mode, OPS["cpu" if packs else "cpu-plain"])[0]


@pytest.mark.parametrize("chunk", [1, 7, 16, 127])
def test_chunks(model: CausalLM, chunk: int) -> None:
    tokens = tokens_of(140 if chunk == 1 else 300, 1)
    whole = Stepper(model).run(tokens, len(tokens))
    assert whole.isfinite().all()
    assert torch.equal(Stepper(model, seed=chunk).run(tokens, chunk), whole)


@pytest.mark.parametrize("block_size", [1, 5, 512])
def test_block_sizes(model: CausalLM, block_size: int) -> None:
    tokens = tokens_of(200, 2)
    assert torch.equal(Stepper(model, block_size=block_size, seed=9).run(tokens, 33), Stepper(model).run(tokens, 200))


def test_threads(model: CausalLM) -> None:
    tokens = tokens_of(270, 3)
    with one_thread():
        alone = Stepper(model).run(tokens, 90)
    assert torch.equal(Stepper(model).run(tokens, 90), alone)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 270), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    block_size=st.sampled_from([1, 4, 16, 48]),
)
def test_batches(model: CausalLM, lengths: list[int], seed: int, block_size: int) -> None:
    """Sequences that enter, advance by random amounts and leave, against each computed alone in one step."""
    rng = np.random.default_rng(seed)
    stepper = Stepper(model, block_size=block_size, num_tokens=8192, seed=seed)
    sequences = [stepper.sequence(tokens_of(length, i)) for i, length in enumerate(lengths)]
    while pending := [s for s in sequences if s.computed < len(s.tokens)]:
        work = []
        for sequence in pending:
            left = len(sequence.tokens) - sequence.computed
            count = min(left, int(rng.choice([0, 1, 5, 16, 40, 200])))
            if count:
                work.append((sequence, count))
        if work:
            stepper.step(work)
    for sequence in sequences:
        assert torch.equal(sequence.all_logits(), Stepper(model).run(sequence.tokens, len(sequence.tokens)))


def test_many_single_tokens(model: CausalLM) -> None:
    """A decode step of 70 sequences: more than one chunk of attention, contexts on both sides of a tile."""
    stepper = Stepper(model, num_tokens=70 * 160, block_size=8)
    sequences = [stepper.sequence(tokens_of(80 + i, i)) for i in range(70)]
    stepper.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    stepper.step([(sequence, 1) for sequence in sequences])
    for sequence in sequences[::17]:
        alone = Stepper(model).run(sequence.tokens, len(sequence.tokens))
        assert torch.equal(sequence.all_logits(), alone)


def test_the_demo_model(demo_model: Path) -> None:
    """Hidden states of real weights; the output head apart, since its products dwarf the rest."""
    model = load(str(demo_model), "bfloat16")[0]
    tokens = np.random.default_rng(4).integers(0, 49152, 150).tolist()
    whole = Stepper(model, head=False).run(tokens, 150)
    assert torch.equal(Stepper(model, block_size=4, head=False).run(tokens, 23), whole)
    stepper = Stepper(model, head=False)
    sequences = [stepper.sequence(tokens[: 140 - i]) for i in range(6)]
    stepper.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    with one_thread():
        stepper.step([(sequence, 1) for sequence in sequences])
    for sequence in sequences:
        assert torch.equal(sequence.all_logits(), whole[: len(sequence.tokens)])
    with torch.inference_mode():
        logits = model.compute_logits(whole[:21])
        assert torch.equal(model.compute_logits(whole[20:21]), logits[20:])
        assert torch.equal(model.compute_logits(whole[5:8]), logits[5:8])
