"""Two steps in flight: the later one names tokens that the earlier one samples, and nothing else changes."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evensong.kernels.cpu import native
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama
from evensong.worker.worker import Worker
from tests.unit.worker.test_runner import make_jobs, results
from tests.unit.worker.worlds import Job, World, make_worker, spoiled

TOKENS = 12
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, logprobs=1)
FREE = SamplingParams(temperature=0.7, seed=3, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), TinyLlama())


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return make_worker(folder)


@pytest.fixture(scope="module", params=["native", "torch"])
def either(request: pytest.FixtureRequest, folder: Path) -> Iterator[Worker]:
    """A worker of each device."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "available", lambda: False)
        made = make_worker(folder)
    assert made.steps_run_elsewhere is (request.param == "native")
    yield made


def run_ahead(world: World, jobs: list[Job], num_tokens: int) -> None:
    """Each step is handed in before the one before it is taken."""

    def wanting() -> list[Job]:
        return [job for job in jobs if len(job.output) + job.unknown < num_tokens]

    world.begin([(job, job.num_tokens) for job in jobs])
    while pending := wanting():
        world.begin([(job, 1) for job in pending])
        world.end()
    world.end()
    for job in jobs:
        world.finish(job)


def alone(worker: Worker, job: Job, num_tokens: int) -> Job:
    World(worker).run([job], num_tokens)
    return job


def test_tokens_that_are_on_their_way_are_the_same_tokens(either: Worker) -> None:
    """Greedy, drawn, penalised by Python, with and without log-probabilities, in one batch."""
    expected = make_jobs()
    for job in expected:
        alone(either, job, TOKENS)
    jobs = make_jobs()
    run_ahead(World(either), jobs, TOKENS)
    assert results(jobs) == results(expected)


def test_outputs_come_in_order_and_the_doorbell_rings(worker: Worker) -> None:
    doorbell = os.eventfd(0, os.EFD_NONBLOCK)
    worker.set_doorbell(doorbell)
    try:
        world, job = World(worker), Job("a", [5, 6, 7], FREE)
        assert worker.num_in_flight == 0 and not worker.output_ready()
        world.begin([(job, 3)])
        world.begin([(job, 1)])
        for left in (2, 1):
            assert worker.num_in_flight == left
            while not worker.output_ready():
                # Whoever sleeps here is woken by each step; an older one's ring may come late.
                assert select.select([doorbell], [], [], 10.0)[0], "a step has run and nobody was told"
                os.read(doorbell, 8)
            assert world.end().sampled_token_ids == [job.output[-1:]]
        assert worker.num_in_flight == 0 and not worker.output_ready()
        assert len(job.output) == 2
        world.finish(job)
    finally:
        worker.set_doorbell(-1)
        os.close(doorbell)


def test_a_place_in_the_feed_table_that_goes_to_another_keeps_its_token(worker: Worker) -> None:
    """What Python samples for a slot that was given up meanwhile comes late; the newcomer has the place by then."""
    expected = alone(worker, Job("new", [9, 8, 7], FREE), 4).output
    world = World(worker)
    old, new = Job("old", [5, 6, 7], PENALISED), Job("new", [9, 8, 7], FREE)
    world.begin([(old, 3)])
    world.preempt(old)
    world.begin([(new, 3)])
    # By now the newcomer's token is in the place that both have had.
    while not worker._runner._steps[-1].run.ready():  # type: ignore[union-attr]
        time.sleep(0.001)
    world.end()
    world.begin([(new, 1)])
    world.end()
    world.begin([(new, 1)])
    world.end()
    world.begin([(new, 1)])
    world.end()
    world.end()
    assert new.output == expected
    world.finish(new)


def test_a_request_that_gets_no_token_is_not_sampled_behind_it(worker: Worker) -> None:
    """Penalties read the tokens before; there is none where the logits were not finite."""
    world = World(worker)
    bad, good = Job("bad", [1, 2, 3], PENALISED), Job("good", [4, 5, 6], PENALISED)
    with spoiled(worker, row=2):
        world.begin([(bad, 3), (good, 3)])
        world.begin([(bad, 1), (good, 1)])
        first, second = world.end(), world.end()
    assert "not finite" in first.errors["bad"] and [len(tokens) for tokens in first.sampled_token_ids] == [0, 1]
    assert second.request_ids == ["bad", "good"] and [len(t) for t in second.sampled_token_ids] == [0, 1]
    world.finish(bad)
    world.finish(good)
    assert good.output == alone(worker, Job("good", [4, 5, 6], PENALISED), 2).output


def test_prompts_are_scored_before_the_next_step_overwrites_them(worker: Worker) -> None:
    scored = SamplingParams(temperature=0.0, prompt_logprobs=2)
    expected = alone(worker, Job("a", list(range(20, 60)), scored), 3)
    world, job = World(worker), Job("a", list(range(20, 60)), scored)
    world.begin([(job, 25)])
    world.begin([(job, 15)])
    world.begin([(job, 1)])
    for _ in range(3):
        world.end()
    world.step([(job, 1)])
    assert job.prompt_logprobs == expected.prompt_logprobs and len(job.prompt_logprobs) == 39
    assert job.output == expected.output
    world.finish(job)


def test_a_step_that_fails_says_so_where_it_is_taken(worker: Worker) -> None:
    world, job = World(worker), Job("a", [1, 2, 3], FREE)
    device: Any = worker._device

    def broken(num_rows: int) -> None:
        raise RuntimeError("the step is broken")

    device.watchers.callbacks["layer 1"] = broken
    device.prepare(worker._kv_cache, worker._max_model_len, worker._num_token_ids)
    try:
        world.begin([(job, 3)])
        world.begin([(job, 1)])
        for _ in range(2):
            with pytest.raises(Exception, match="broken|failed"):
                worker.take_output()
        assert worker.num_in_flight == 0
    finally:
        del device.watchers.callbacks["layer 1"]
        device.prepare(worker._kv_cache, worker._max_model_len, worker._num_token_ids)
    world.finish(job)
    assert len(alone(worker, Job("b", [1, 2, 3], FREE), 2).output) == 2


def test_blocks_are_copied_behind_the_steps_before(worker: Worker) -> None:
    """A copy is planned while the step that writes its source is in flight."""
    prompt = np.random.default_rng(1).integers(0, 200, 12).tolist()
    expected = alone(worker, Job("alone", prompt, FREE), 3).output
    world = World(worker)
    first, second = Job("first", prompt, PENALISED), Job("second", prompt, FREE)
    world.begin([(first, 12)])
    # The second one shares the full block, and gets a copy of the other; it computes the last token alone.
    second.blocks, second.computed = [first.blocks[0], world.free.pop()], 11
    world.copies = [(first.blocks[1], second.blocks[1])]
    world.begin([(first, 1), (second, 1)])
    world.end()
    world.begin([(second, 1)])
    world.end()
    world.begin([(second, 1)])
    world.end()
    world.end()
    assert second.output == expected
