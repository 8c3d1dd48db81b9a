"""The runner on a tiny model: the same request gives the same bits however its work is cut, placed and resumed."""

from __future__ import annotations

import numpy as np
import pytest

from evensong.protocol.output import TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.tiny_models import NUM_TOKENS, TinyLlama, write_tiny_llama
from evensong.worker.worker import Worker
from tests.unit.models.stepping import arrays_of, poison
from tests.unit.worker.worlds import NUM_BLOCKS, Job, World, make_worker, spoiled

TOKENS = 12
PARAMS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, seed=5, logprobs=0),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, logprobs=1),
    SamplingParams(temperature=1.2, seed=7, top_k=9, frequency_penalty=0.5),
)
Results = list[tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama(dtype=request.param))
    return make_worker(folder)


def make_jobs() -> list[Job]:
    rng = np.random.default_rng(3)
    lengths = (1, 40, 7, 16, 33, 8, 3, 21)
    return [
        Job(f"r{i}", rng.integers(0, NUM_TOKENS - 1, length).tolist(), PARAMS[i % len(PARAMS)])
        for i, length in enumerate(lengths)
    ]


def results(jobs: list[Job]) -> Results:
    return [(job.output, job.logprobs) for job in jobs]


def solo(worker: Worker) -> Results:
    jobs = make_jobs()
    for job in jobs:
        World(worker).run([job], TOKENS)
    return results(jobs)


@pytest.fixture(scope="module")
def expected(worker: Worker) -> Results:
    found = solo(worker)
    assert all(len(tokens) == TOKENS for tokens, _ in found)
    assert len({tuple(tokens) for tokens, _ in found}) == len(found)
    return found


def test_in_one_batch(worker: Worker, expected: Results) -> None:
    jobs = make_jobs()
    World(worker).run(jobs, TOKENS)
    assert results(jobs) == expected


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_in_chunks(worker: Worker, expected: Results, chunk: int) -> None:
    jobs = make_jobs()
    World(worker).run(jobs, TOKENS, chunk)
    assert results(jobs) == expected


def test_in_other_blocks_with_stale_memory(worker: Worker, expected: Results) -> None:
    """Freed memory holds NaN; nothing that a request did not write may reach it."""
    assert worker._runner is not None
    for array in arrays_of(worker._device):
        poison(array, 0, len(array) - 1)
    jobs = make_jobs()
    World(worker, np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()).run(jobs, TOKENS, 7)
    assert results(jobs) == expected


def test_through_preemptions(worker: Worker, expected: Results) -> None:
    world, jobs = World(worker), make_jobs()
    rng = np.random.default_rng(8)
    while pending := [job for job in jobs if len(job.output) < TOKENS]:
        for job in pending:
            if job.has_slot and rng.random() < 0.15:
                world.preempt(job)
        world.step([(job, min(int(rng.integers(1, 20)), job.num_tokens - job.computed)) for job in pending])
    assert results(jobs) == expected


def test_on_a_shared_prefix(worker: Worker) -> None:
    """Blocks that another request wrote serve as its own."""
    prompt = list(range(50, 90))
    world = World(worker)
    first = Job("first", prompt, PARAMS[0])
    world.step([(first, len(prompt))])
    second = Job("second", prompt, PARAMS[2], computed=32, blocks=first.blocks[:4])
    third = Job("third", prompt, PARAMS[2])
    while len(second.output) < TOKENS:
        world.step([(job, job.num_tokens - job.computed) for job in (second, third)])
    assert results([second]) == results([third])


def test_resumed_with_its_tokens_elsewhere(worker: Worker, expected: Results) -> None:
    jobs = make_jobs()
    for job, (tokens, logprobs) in zip(jobs, expected, strict=True):
        job.output = tokens[:5]
        job.logprobs = logprobs[:5]
    World(worker).run(jobs, TOKENS)
    assert results(jobs) == expected


def test_a_warm_up_between_steps_changes_nothing(worker: Worker, expected: Results) -> None:
    world, jobs = World(worker), make_jobs()
    while pending := [job for job in jobs if len(job.output) < TOKENS]:
        world.step([(job, min(9, job.num_tokens - job.computed)) for job in pending])
        worker.measure_token_rate()
    assert results(jobs) == expected


def test_padding_of_the_vocabulary_never_comes(worker: Worker) -> None:
    jobs = [Job(f"p{seed}", [1, 2, 3], SamplingParams(temperature=1e9, seed=seed, logprobs=20)) for seed in range(30)]
    World(worker).run(jobs, 10)
    seen = {token for job in jobs for token in job.output}
    assert max(seen) < NUM_TOKENS and len(seen) > 100
    assert all(token < NUM_TOKENS for job in jobs for entry in job.logprobs for token in entry.token_ids)


def test_a_step_that_only_releases(worker: Worker) -> None:
    world = World(worker)
    job = Job("gone", [1, 2, 3], PARAMS[0])
    world.step([(job, 3)])
    world.finish(job)
    assert world.step([]).request_ids == []
    assert worker._runner is not None


def test_an_unfinished_prompt_samples_nothing(worker: Worker) -> None:
    world = World(worker)
    job = Job("half", list(range(20)), PARAMS[0])
    assert world.step([(job, 12)]).sampled_token_ids == []
    assert len(world.step([(job, 8)]).sampled_token_ids) == 1
    world.finish(job)


def test_logits_that_are_not_finite_end_one_request(worker: Worker) -> None:
    jobs = make_jobs()[:3]
    world = World(worker)
    with spoiled(worker, row=0):
        output = world.step([(job, job.num_tokens) for job in jobs])
    assert list(output.errors) == ["r0"] and "not finite" in output.errors["r0"]
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1, 1]
