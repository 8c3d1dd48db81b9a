"""Log-probabilities of prompts: the definition, the same bits however the prompt is cut, and bounded memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.output import TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.tiny_models import NUM_TOKENS, TinyLlama, write_tiny_llama
from evensong.worker import device as device_module
from evensong.worker import native_step, prompt_scores
from evensong.worker.worker import Worker
from tests.unit.worker.worlds import BLOCK, NUM_BLOCKS, Job, World, make_worker, spoiled

LENGTHS = (1, 2, 90, 17, 64, 65, 40)
K = (0, 1, 3, 0, 2, 3, None)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return make_worker(write_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(dtype=request.param)))


def make_jobs() -> list[Job]:
    rng = np.random.default_rng(4)
    return [
        Job(
            f"r{i}",
            rng.integers(0, NUM_TOKENS - 1, length).tolist(),
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=k, max_tokens=9),
        )
        for i, (length, k) in enumerate(zip(LENGTHS, K, strict=True))
    ]


def found(jobs: list[Job]) -> list[tuple[list[TokenLogprobs], list[int], list[TokenLogprobs]]]:
    return [(job.prompt_logprobs, job.output, job.logprobs) for job in jobs]


Found = list[tuple[list[TokenLogprobs], list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def expected(worker: Worker) -> Found:
    jobs = make_jobs()
    for job in jobs:
        World(worker).run([job], 3)
    return found(jobs)


def test_each_token_but_the_first_once_with_its_rank(worker: Worker, expected: Found) -> None:
    assert worker._runner is not None
    for job, (positions, _, _) in zip(make_jobs(), expected, strict=True):
        k = job.params.prompt_logprobs
        assert len(positions) == (0 if k is None else len(job.prompt) - 1)
        for index, at in enumerate(positions):
            assert at.token_ids[0] == job.prompt[index + 1] and len(at.token_ids) == 1 + (k or 0)
            better = [value for value in at.logprobs[1:] if value > at.logprobs[0]]
            assert at.rank > len(better) and all(math.isfinite(value) for value in at.logprobs)
            if at.rank <= (k or 0):
                assert at.token_ids[0] in at.token_ids[1:]


def test_a_position_says_what_sampling_there_says(worker: Worker, expected: Found) -> None:
    """The prompt that ends before a token samples with the same distribution that scores the token."""
    whole, (positions, _, _) = make_jobs()[2], expected[2]
    for cut in (1, 16, 63, 64, 65, 89):
        job = Job("cut", whole.prompt[:cut], SamplingParams(temperature=0.0, logprobs=3))
        World(worker).run([job], 1)
        assert positions[cut - 1].token_ids[1:] == job.logprobs[0].token_ids[1:]
        assert positions[cut - 1].logprobs[1:] == job.logprobs[0].logprobs[1:]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 30])
@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_neither_chunks_nor_batches_nor_rows_at_once_matter(
    worker: Worker, expected: Found, chunk: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_step, "ROWS_AT_ONCE", at_once)
    jobs = make_jobs()
    World(worker).run(jobs, 3, chunk)
    assert found(jobs) == expected


def test_preemption_repeats_nothing_and_changes_nothing(worker: Worker, expected: Found) -> None:
    world, jobs = World(worker), make_jobs()
    rng = np.random.default_rng(8)
    while pending := [job for job in jobs if len(job.output) < 3]:
        for job in pending:
            if job.has_slot and rng.random() < 0.3:
                world.preempt(job)
        world.step([(job, min(int(rng.integers(1, 30)), job.num_tokens - job.computed)) for job in pending])
    for job in jobs:
        world.finish(job)
    assert found(jobs) == expected


def test_logits_are_made_for_a_few_rows_at_a_time(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    original, most = native_step.NativeStep._run_head, 0

    def run_head(self: native_step.NativeStep, rows: range, samples: Any) -> Any:
        nonlocal most
        most = max(most, len(rows))
        return original(self, rows, samples)

    monkeypatch.setattr(native_step.NativeStep, "_run_head", run_head)
    World(worker).run([Job("long", [5] * 200, SamplingParams(prompt_logprobs=1))], 1)
    assert most == device_module.ROWS_AT_ONCE


def test_logits_that_are_not_finite_end_one_request(worker: Worker) -> None:
    world = World(worker)
    jobs = [Job("bad", [5] * 20, SamplingParams(prompt_logprobs=1)), Job("good", [6] * 9, SamplingParams())]
    with spoiled(worker, row=3):
        output = world.step([(job, len(job.prompt)) for job in jobs])
    assert output.errors == {"bad": prompt_scores.NOT_FINITE} and output.prompt_scores == {}
    for job in jobs:
        world.finish(job)


def test_nothing_is_made_where_nothing_is_asked_for(tmp_path: Path) -> None:
    worker = make_worker(write_tiny_llama(tmp_path, TinyLlama()))
    output = World(worker).step([(Job("plain", [5] * 20, SamplingParams()), 20)])
    assert output.prompt_scores == {} and output.errors == {}


def test_more_rows_are_scored_than_a_step_may_sample(tmp_path: Path) -> None:
    """The rows that a step may sample follow from the requests that may run; those of a prompt do not."""
    worker = make_worker(write_tiny_llama(tmp_path, TinyLlama()))
    worker.initialize_from_config(KVCacheConfig(NUM_BLOCKS, BLOCK, max_num_seqs=1), 256)
    job = Job("long", [5] * 150, SamplingParams(prompt_logprobs=1))
    World(worker).run([job], 1)
    assert len(job.prompt_logprobs) == 149
