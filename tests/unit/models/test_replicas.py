"""Several ranks, one answer: stages change no bit, parts little, and each number of parts keeps its own bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evensong import _native
from evensong.kernels.dispatch import OPS
from evensong.kernels.mode import FLOAT32
from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import SamplingRow
from evensong.sampling.sampler import Sampled
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer
from evensong.testing.tiny_models import NUM_TOKENS, TinyLlama, write_tiny_llama
from evensong.worker.batch import Batch
from evensong.worker.device import NotFiniteError, StepMark
from tests.unit.models.random_models import random_model
from tests.unit.models.replica import load_replica
from tests.unit.models.stepping import Stepper, load
from tests.unit.models.test_families import CASES, CONFIGS, tokens_of
from tests.unit.models.test_parity import TEXT

EMPTY = np.zeros(0, dtype=np.int64)


def run(model: Any, tokens: list[int], chunk: int = 100) -> torch.Tensor:
    return Stepper(model).run(tokens, chunk)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_stages_change_no_bit_and_parts_little(family: str, case: str, tmp_path: Path) -> None:
    random_model(CONFIGS[family][case](), tmp_path)
    tokens = tokens_of(150)
    folder = str(tmp_path)
    whole = run(load(folder, "float32")[0], tokens)
    assert torch.equal(run(load_replica(folder, "float32", 1, 2), tokens), whole)
    assert torch.equal(run(load_replica(folder, "float32", 1, 3), tokens, 40), whole)
    for parts in (2, 3, 4):
        shared = run(load_replica(folder, "float32", parts), tokens)
        assert 0 < (shared - whole).abs().max() < 1e-4
        assert torch.equal(run(load_replica(folder, "float32", parts, 2), tokens, 61), shared)
    for stages in (2, 3):
        assert torch.equal(run(load_replica(folder, "float32", 4, stages), tokens), shared)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3"])
def test_chunks_and_neighbours_change_no_bit(family: str, dtype: str, tmp_path: Path) -> None:
    random_model(list(CONFIGS[family].values())[-1](), tmp_path)
    tokens = tokens_of(140)
    model = load_replica(str(tmp_path), dtype, 2, 2)
    whole = run(model, tokens, 140)
    assert whole.isfinite().all()
    assert torch.equal(Stepper(model, seed=7, block_size=5).run(tokens, 17), whole)
    stepper = Stepper(model, block_size=8)
    sequences = [stepper.sequence(tokens[: 120 - 9 * i]) for i in range(5)]
    stepper.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    stepper.step([(sequence, 1) for sequence in sequences])
    for sequence in sequences:
        assert torch.equal(sequence.all_logits(), whole[: len(sequence.tokens)])


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_and_op_by_op(isa: str, tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path, TinyLlama(hidden_size=72, num_heads=9, num_kv_heads=3, num_layers=3)))
    tokens = tokens_of(60)
    tokens = [token % 256 for token in tokens]
    whole = run(load(folder, "bfloat16", isa=isa)[0], tokens)
    assert torch.equal(run(load_replica(folder, "bfloat16", 1, 3, isa=isa), tokens), whole)
    shared = run(load_replica(folder, "bfloat16", 2, isa=isa), tokens)
    assert (shared - whole).abs().max() < 0.1
    assert torch.equal(run(load_replica(folder, "bfloat16", 2, 2, isa=isa, eager=True), tokens), shared)


def test_asked_layers_and_every_number_of_parts(tmp_path: Path) -> None:
    model = TinyLlama(hidden_size=72, num_heads=9, num_kv_heads=3, num_layers=4, vocab_size=300)
    folder = str(write_tiny_llama(tmp_path, model))
    tokens = [token % 256 for token in tokens_of(50)]
    whole = run(load(folder, "float32")[0], tokens)
    assert torch.equal(run(load_replica(folder, "float32", 1, 2, layers="3,1"), tokens), whole)
    for parts in range(2, 10):
        assert (run(load_replica(folder, "float32", parts), tokens) - whole).abs().max() < 1e-4
    with pytest.raises(ConfigError, match="1 to 9 can"):
        load_replica(folder, "float32", 10)
    with pytest.raises(ConfigError, match="names 2 stages"):
        load_replica(folder, "float32", 1, 3, layers="3,1")


def sampled(
    model: Any, rows: list[SamplingRow], masks: dict[int, Any] | None = None, num_token_ids: int | None = None
) -> list[Sampled]:
    """What the rows draw after as many sequences of 9 tokens."""
    stepper = Stepper(model)
    if num_token_ids is not None:
        stepper.device.prepare(stepper.config, 2048, num_token_ids)
    count = len(rows)
    tokens = np.array(tokens_of(9 * count), dtype=np.int64) % 256
    sequences = [stepper.sequence(tokens[9 * i : 9 * i + 9].tolist()) for i in range(count)]
    batch = Batch(
        tokens,
        [9] * count,
        [0] * count,
        [one.blocks for one in sequences],
        9 * np.arange(1, count + 1, dtype=np.int64) - 1,
    )
    results = []
    for _ in range(2):  # the second time over the same blocks: everything is where it was
        step = stepper.device.start(batch, rows, StepMark(deferred=masks is not None))
        if masks is not None:
            step.draw(masks)
        step.wait()
        results = [step.sampled(index) for index in range(count)]
    return results


def row(**params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), EMPTY, EMPTY, [])


@pytest.mark.parametrize(("parts", "stages"), [(2, 1), (3, 2), (1, 3)])
def test_the_output_rank_draws_over_all_parts(parts: int, stages: int, tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path, TinyLlama(num_layers=3, num_heads=4)))
    whole, shared = load(folder, "float32")[0], load_replica(folder, "float32", parts, stages)
    greedy = [row(temperature=0.0)] * 6
    tokens = [one.token_id for one in sampled(whole, greedy)]
    assert [one.token_id for one in sampled(shared, greedy)] == tokens and len(set(tokens)) > 1
    mixed = [
        row(temperature=0.0, logprobs=3),
        row(temperature=1.0, seed=5),
        row(temperature=0.7, seed=6, top_p=0.9, logprobs=0),
        row(temperature=0.0, repetition_penalty=1.3),
    ]
    ours, theirs = sampled(shared, mixed), sampled(whole, mixed)
    assert [one.token_id for one in ours] == [one.token_id for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.token_ids == other.logprobs.token_ids
            assert np.allclose(one.logprobs.logprobs, other.logprobs.logprobs, atol=1e-4)


def test_masks_come_to_the_output_rank(tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path))
    shared = load_replica(folder, "float32", 2, 2)
    rows = [SamplingRow(SamplingParams(temperature=0.0), EMPTY, EMPTY, [])] * 2
    mask = np.zeros(-(-NUM_TOKENS // 32), dtype=np.uint32)
    mask[201 // 32] |= 1 << (201 % 32)
    results = sampled(shared, rows, {1: mask})
    free = sampled(load(folder, "float32")[0], rows, {})
    assert [one.token_id for one in results] == [free[0].token_id, 201]


@pytest.mark.parametrize(("parts", "stages"), [(2, 1), (2, 2), (1, 2)])
def test_prompts_are_scored_by_all_parts(parts: int, stages: int, tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path))
    tokens = [token % 256 for token in tokens_of(150)]
    scores = []
    for model in (load(folder, "float32")[0], load_replica(folder, "float32", parts, stages)):
        stepper = Stepper(model)
        sequence = stepper.sequence(tokens)
        batch = Batch(np.array(tokens, dtype=np.int64), [150], [0], [sequence.blocks], EMPTY)
        step = stepper.device.start(batch, [])
        step.wait()
        scores.append(step.score(range(149), tokens[1:], 2))
    assert len(scores[0]) == len(scores[1]) == 149
    for one, other in zip(*scores, strict=True):
        assert one.token_ids == other.token_ids
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert parts > 1 or one == other


def test_logits_that_are_not_finite_leave_the_ranks_in_step(tmp_path: Path) -> None:
    """The output rank refuses the prompt after all parts of it; the others went through the same."""
    folder = str(write_tiny_llama(tmp_path))
    shared = load_replica(folder, "float32", 2)
    tokens = [token % 256 for token in tokens_of(150)]
    stepper = Stepper(shared)
    for device in stepper.device.devices:

        def spoil(num_rows: int, device: Any = device) -> None:
            if num_rows == 150:
                device._recording.program.view(0, num_rows)[3] = np.nan

        device.watchers.callbacks = {"layer 1": spoil}
    stepper.device.prepare(stepper.config, 2048, NUM_TOKENS)
    sequence = stepper.sequence(tokens)
    batch = Batch(np.array(tokens, dtype=np.int64), [150], [0], [sequence.blocks], EMPTY)
    step = stepper.device.start(batch, [])
    step.wait()
    with pytest.raises(NotFiniteError):
        step.score(range(149), tokens[1:], 0)
    assert len(step.score(range(100, 149), tokens[101:], 0)) == 49
    other = stepper.sequence(tokens[:20])
    stepper.step([(other, 20)])
    assert torch.equal(other.all_logits()[:, :NUM_TOKENS], run(shared, tokens[:20])[:, :NUM_TOKENS])


def test_memory_is_that_of_the_ranks_own_layers_and_heads(tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path, TinyLlama(num_layers=3, hidden_size=72, num_heads=9, num_kv_heads=3)))
    replica = load_replica(folder, "float32", 2, 2)
    specs = [[(spec.layer, spec.num_kv_heads) for spec in device.kv_specs()] for device in replica.devices]
    assert specs == [[(0, 2), (1, 2)], [(0, 1), (1, 1)], [(2, 2)], [(2, 1)]]
    stepper = Stepper(replica)
    widths = [array.shape[1] for device in stepper.device.devices for array in device._kv.arrays]
    assert widths == [2 * 2 * 8, 2 * 2 * 8, 2 * 8, 2 * 8, 2 * 2 * 8, 2 * 8]


def logprobs(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    picked = torch.tensor(tokens[1:]).unsqueeze(1)
    return logits[:-1].double().log_softmax(1).gather(1, picked)


def test_the_demo_model_in_two_parts(demo_model: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(demo_model), progress=False))
    whole, shared = load(str(demo_model), "float32")[0], load_replica(str(demo_model), "float32", 2)
    for text in (TEXT[:300], TEXT[500:720], "def add(a, b):\n    return a + b\n"):
        tokens = tokenizer.encode(text)
        ours, theirs = logprobs(run(shared, tokens), tokens), logprobs(run(whole, tokens), tokens)
        assert 0 < (ours - theirs).abs().max() <= 1e-3
    staged = load_replica(str(demo_model), "float32", 2, 2)
    assert torch.equal(run(staged, tokens), run(shared, tokens))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_torch_devices_exchange_the_same(family: str, tmp_path: Path) -> None:
    """Between processes gloo does, here between threads: stages change no bit, parts little."""
    random_model(list(CONFIGS[family].values())[-1](), tmp_path)
    folder, tokens = str(tmp_path), tokens_of(90)
    whole = run(load(folder, "float32", FLOAT32, OPS["cpu"])[0], tokens)
    shared = run(load_replica(folder, "float32", 3, mode=FLOAT32, ops=OPS["cpu"]), tokens)
    assert 0 < (shared - whole).abs().max() < 1e-4
    assert torch.equal(run(load_replica(folder, "float32", 3, 2, mode=FLOAT32, ops=OPS["cpu"]), tokens, 37), shared)
    assert torch.equal(run(load_replica(folder, "float32", 1, 3, mode=FLOAT32, ops=OPS["cpu"]), tokens, 37), whole)


def test_torch_draws_and_scores_on_the_output_rank(tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path))
    whole = load(folder, "float32", FLOAT32, OPS["cpu"])[0]
    shared = load_replica(folder, "float32", 2, 2, mode=FLOAT32, ops=OPS["cpu"])
    rows = [row(temperature=0.0, logprobs=2), row(temperature=1.0, seed=5), row(temperature=0.0)]
    ours, theirs = sampled(shared, rows), sampled(whole, rows)
    assert [one.token_id for one in ours] == [one.token_id for one in theirs]
    tokens = [token % 256 for token in tokens_of(80)]
    stepper = Stepper(shared)
    sequence = stepper.sequence(tokens)
    step = stepper.device.start(Batch(np.array(tokens, dtype=np.int64), [80], [0], [sequence.blocks], EMPTY), [])
    step.wait()
    assert len(step.score(range(79), tokens[1:], 0)) == 79
    for array in stepper.device.devices[2]._kv._host.arrays:
        array[:] = np.nan  # what the last stage reads next
    step = stepper.device.start(Batch(np.array([5], dtype=np.int64), [1], [79], [sequence.blocks], EMPTY), [])
    step.wait()
    with pytest.raises(NotFiniteError):
        step.score(range(1), [7], 0)


@pytest.mark.parametrize("torch_ops", [False, True])
def test_tokens_reach_the_first_stage_through_the_table(torch_ops: bool, tmp_path: Path) -> None:
    """A step names the token that the step before draws; no rank but the last one has seen it."""
    folder = str(write_tiny_llama(tmp_path, TinyLlama(num_layers=3)))
    how: dict[str, Any] = {"mode": FLOAT32, "ops": OPS["cpu"]} if torch_ops else {}
    stepper = Stepper(load_replica(folder, "float32", 2, 3, **how))
    tokens = [token % 256 for token in tokens_of(12)]
    sequence = stepper.sequence([*tokens, 0, 0, 0])
    started: list[Any] = []
    feed = SamplingRow(SamplingParams(temperature=0.0), EMPTY, EMPTY, [], feed_slot=3)
    inputs, computed = tokens, 0
    for step_id in range(3):
        last = np.array([len(inputs) - 1], dtype=np.int64)
        batch = Batch(np.array(inputs, dtype=np.int64), [len(inputs)], [computed], [sequence.blocks], last)
        started.append(stepper.device.start(batch, [feed], StepMark(step_id, feed_after=step_id - 1, publishes=True)))
        if torch_ops or step_id > 0:  # native steps are handed in before the step is over whose token they name
            started[step_id - (not torch_ops)].wait()
        computed += len(inputs)
        inputs = [-1 - 3]
    started[-1].wait()
    drawn = [step.sampled(0).token_id for step in started]
    plain = Stepper(load(folder, "float32", *(how.values()))[0])
    expected = list(tokens)
    for token in drawn:
        logits = plain.run(expected, len(expected))[-1, :NUM_TOKENS]
        assert token == int(logits.argmax())
        expected.append(token)


@pytest.mark.parametrize("torch_ops", [False, True])
def test_ranks_say_the_same_of_themselves_whatever_the_stages(torch_ops: bool, tmp_path: Path) -> None:
    folder = str(write_tiny_llama(tmp_path, TinyLlama(num_layers=3, num_heads=4)))
    how: dict[str, Any] = {"mode": FLOAT32, "ops": OPS["cpu"]} if torch_ops else {}

    def described(parts: int, stages: int) -> dict[str, str]:
        parts_of = Stepper(load_replica(folder, "float32", parts, stages, **how)).device.on_all(lambda d: d.describe())
        assert all(one == parts_of[0] for one in parts_of)
        return dict(parts_of[0])

    alone = load(folder, "float32", *how.values())[0].describe()
    assert described(1, 2) == described(1, 3) == alone
    # Parts of a matrix have trials of their own.
    assert described(3, 1) == described(3, 2) and (described(3, 1) != alone) == torch_ops


@pytest.mark.parametrize("torch_ops", [False, True])
def test_after_a_sleep_the_ranks_go_on(torch_ops: bool, tmp_path: Path) -> None:
    """Weights and KV memory come back; what the ranks share stayed, with its counters."""
    folder = str(write_tiny_llama(tmp_path, TinyLlama(num_layers=3)))
    how: dict[str, Any] = {"mode": FLOAT32, "ops": OPS["cpu"]} if torch_ops else {}
    stepper = Stepper(load_replica(folder, "float32", 2, 2, **how))
    tokens = [token % 256 for token in tokens_of(30)]
    before = stepper.run(tokens, 13)
    replica = stepper.device
    replica.on_all(lambda device: (device.keep_kv(False), device.unload()))
    replica.load(folder)
    replica.on_all(lambda device: device.keep_kv(True))
    replica.prepare(stepper.config, 2048, stepper.vocab_size(replica))
    assert torch.equal(stepper.run(tokens, 13), before)


def test_parts_that_have_nothing_but_padding_of_the_vocabulary(tmp_path: Path) -> None:
    model = TinyLlama(hidden_size=72, num_heads=9, num_kv_heads=3, vocab_size=320)
    folder = str(write_tiny_llama(tmp_path, model))
    rows = [row(temperature=0.0)] * 4 + [row(temperature=1.0, seed=2, logprobs=1)]
    whole, shared = load(folder, "float32")[0], load_replica(folder, "float32", 9)
    for count in (rows[:4], rows):
        ours, theirs = (sampled(one, count, num_token_ids=NUM_TOKENS) for one in (shared, whole))
        assert [one.token_id for one in ours] == [one.token_id for one in theirs]
