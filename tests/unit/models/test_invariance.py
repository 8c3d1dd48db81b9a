"""One sequence, one result: alone or among others, in any chunks, in any blocks, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evensong import _native
from evensong.kernels.dispatch import OPS
from evensong.kernels.linear import one_thread
from evensong.kernels.mode import BFLOAT16, FLOAT32, WIDENED, NumericMode
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama
from evensong.worker.device import Device
from tests.unit.models.stepping import Stepper, load

# Groups of 3 and of 1, one key head alone, sizes that fill no whole vector.
SIZES = {
    "groups of 3": TinyLlama(hidden_size=72, num_heads=9, num_kv_heads=3, intermediate_size=100),
    "one key head": TinyLlama(hidden_size=64, num_heads=4, num_kv_heads=1),
    "one head": TinyLlama(hidden_size=32, num_heads=1, num_kv_heads=1),
    "hybrid": TinyLlama(num_layers=3, num_kv_heads=1, window=50, layers_with_window=(0, 2)),
}
ISAS: list[str] = _native.supported_isas()
# (sizes, instruction set or torch's mode, run dtype, dtype of the cache)
MODELS: list[tuple[str, str | NumericMode, str, str]] = [
    ("groups of 3", WIDENED, "float32", "auto"),
    ("one key head", FLOAT32, "float32", "auto"),
    ("hybrid", BFLOAT16, "float32", "auto"),
    *[("groups of 3", isa, "bfloat16", "auto") for isa in ISAS],
    *[("hybrid", isa, "float32", "auto") for isa in ISAS],
    ("hybrid", ISAS[0], "bfloat16", "float32"),
    ("one key head", ISAS[0], "float32", "bfloat16"),
    ("one head", ISAS[0], "bfloat16", "auto"),
]


def tokens_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def make(folder: Path, kind: str | NumericMode, dtype: str, kv_dtype: str, **more: Any) -> Device:
    if isinstance(kind, str):
        return load(str(folder), dtype, isa=kind, kv_dtype=kv_dtype, **more)[0]
    # oneDNN packs bfloat16 weights on processors with AVX-512 only; plain products compute in bfloat16 anywhere.
    packs = kind.compute != "bfloat16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return load(str(folder), dtype, kind, OPS["cpu" if packs else "cpu-plain"])[0]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    sizes, kind, dtype, kv_dtype = request.param
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), SIZES[sizes])
    yield make(folder, kind, dtype, kv_dtype)


@pytest.mark.parametrize("chunk", [1, 7, 16, 127])
def test_chunks(model: Device, chunk: int) -> None:
    tokens = tokens_of(140 if chunk == 1 else 300, 1)
    whole = Stepper(model).run(tokens, len(tokens))
    assert whole.isfinite().all()
    assert torch.equal(Stepper(model, seed=chunk).run(tokens, chunk), whole)


@pytest.mark.parametrize("block_size", [1, 5, 512])
def test_block_sizes(model: Device, block_size: int) -> None:
    tokens = tokens_of(200, 2)
    assert torch.equal(Stepper(model, block_size=block_size, seed=9).run(tokens, 33), Stepper(model).run(tokens, 200))


def test_threads_of_torch(model: Device) -> None:
    tokens = tokens_of(270, 3)
    with one_thread():
        alone = Stepper(model).run(tokens, 90)
    assert torch.equal(Stepper(model).run(tokens, 90), alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "how", [{"threads": 1}, {"threads": 5}, {"eager": True}, {"eager": True, "threads": 3}], ids=str
)
def test_native_threads_and_eager_steps(dtype: str, how: dict[str, Any], tmp_path: Path) -> None:
    """With more threads than processors too: who computes what is then left to chance."""
    folder = write_tiny_llama(tmp_path, SIZES["groups of 3"])
    tokens = tokens_of(270, 3)
    whole = Stepper(make(folder, ISAS[0], dtype, "auto")).run(tokens, 270)
    assert torch.equal(Stepper(make(folder, ISAS[0], dtype, "auto", **how)).run(tokens, 90), whole)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 270), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    block_size=st.sampled_from([1, 4, 16, 48]),
)
def test_batches(model: Device, lengths: list[int], seed: int, block_size: int) -> None:
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


def test_many_single_tokens(model: Device) -> None:
    """A decode step of 70 sequences: more than one chunk of attention, contexts on both sides of a tile."""
    stepper = Stepper(model, num_tokens=70 * 160, block_size=8)
    sequences = [stepper.sequence(tokens_of(80 + i, i)) for i in range(70)]
    stepper.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    stepper.step([(sequence, 1) for sequence in sequences])
    for sequence in sequences[::17]:
        alone = Stepper(model).run(sequence.tokens, len(sequence.tokens))
        assert torch.equal(sequence.all_logits(), alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_model(demo_model: Path, dtype: str) -> None:
    """Real weights, in chunks, in a batch, on one thread and op by op."""
    model = load(str(demo_model), dtype)[0]
    tokens = np.random.default_rng(4).integers(0, 49152, 150).tolist()
    whole = Stepper(model).run(tokens, 150)
    assert whole.isfinite().all()
    assert torch.equal(Stepper(model, block_size=4).run(tokens, 23), whole)
    others = (load(str(demo_model), dtype, threads=1)[0], load(str(demo_model), dtype, eager=True)[0])
    for other in others:
        stepper = Stepper(other)
        sequences = [stepper.sequence(tokens[: 140 - i]) for i in range(6)]
        stepper.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
        stepper.step([(sequence, 1) for sequence in sequences])
        for sequence in sequences:
            assert torch.equal(sequence.all_logits(), whole[: len(sequence.tokens)])


def test_a_context_of_several_splits(tmp_path: Path) -> None:
    """Long contexts are cut at fixed positions: one sequence alone is cut among the threads, a batch is not."""
    folder = write_tiny_llama(
        tmp_path, TinyLlama(hidden_size=32, num_heads=2, num_kv_heads=1, max_position_embeddings=4096)
    )
    tokens = tokens_of(2600, 6)
    whole = Stepper(make(folder, ISAS[0], "bfloat16", "auto"), max_model_len=4096).run(tokens, 2600)
    stepper = Stepper(make(folder, ISAS[0], "bfloat16", "auto", threads=3), max_model_len=4096, num_tokens=40_000)
    alone = stepper.sequence(tokens)
    stepper.step([(alone, 2597)])
    for _ in range(3):
        stepper.step([(alone, 1)])
    assert torch.equal(alone.all_logits(), whole)
    crowd = [stepper.sequence(tokens[: 2600 - 100 * i]) for i in range(13)]
    for sequence in crowd:
        stepper.step([(sequence, len(sequence.tokens) - 2)])
    stepper.step([(sequence, 2) for sequence in crowd])
    for sequence in crowd:
        assert torch.equal(sequence.all_logits(), whole[: len(sequence.tokens)])
