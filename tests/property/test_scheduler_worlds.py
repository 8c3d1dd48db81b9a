"""Random worlds: the scheduler does what the naive one does, and every request gets what it gets alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.kvcache.layout import KVLayout
from evensong.protocol.output import FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.scheduler import policy, queue
from evensong.scheduler.budget import SchedulerLimits
from evensong.testing.fake_executor import VOCAB_SIZE, scripted_token
from tests.property.naive_scheduler import Windows
from tests.property.world import World, solo

Operation = tuple[str, Any]
ADD = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),
        "length": st.integers(1, 40),
        "own": st.integers(0, 3),
        "max_tokens": st.integers(1, 20),
        "min_tokens": st.integers(0, 4),
        "stops": st.booleans(),
        "salt": st.sampled_from([None, None, None, "a"]),
        "resumed": st.sampled_from([0, 0, 0, 1, 6]),
        "client": st.integers(0, 1),
        "prompt_logprobs": st.sampled_from([None, None, None, 0, 1]),
        "priority": st.sampled_from([0, 0, 0, 1, 7, -(2**63)]),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ADD),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("abort while it runs"), st.integers(0, 30)),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("budget"), st.integers(1, 4)),
    ),
    max_size=40,
)


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    max_model_len = draw(st.integers(2, 64))
    chunked = draw(st.sampled_from([True, True, True, False]))
    budget = draw(st.integers(1, 24)) if chunked else max_model_len
    return SchedulerLimits(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 5])),
        max_num_queued_reqs=draw(st.integers(1, 12)),
    )


def make(index: int, kind: dict[str, Any], max_model_len: int) -> EngineCoreRequest:
    prompt = [kind["family"]] * kind["length"] + [500 + kind["own"]] * kind["own"]
    params = SamplingParams(
        seed=1,
        max_tokens=kind["max_tokens"],
        min_tokens=min(kind["min_tokens"], kind["max_tokens"]),
        # Half of all ids: a stop comes soon.
        stop_token_ids=list(range(10, VOCAB_SIZE, 2)) if kind["stops"] else None,
        prompt_logprobs=kind["prompt_logprobs"],
    )
    request = EngineCoreRequest(f"r{index}", prompt, params, client_index=kind["client"], cache_salt=kind["salt"])
    request.priority = kind.get("priority", 0)
    if kind["resumed"] and len(prompt) < max_model_len:
        made = solo(request, max_model_len)
        request.output_token_ids = made[: min(kind["resumed"], len(made) - 1)]
        request.attempt = 1
        if kind["prompt_logprobs"] is not None:
            # Part of them had come when it was lost; a token of output comes after all of them.
            whole = len(prompt) - 1
            request.prompt_logprobs_delivered = whole if request.output_token_ids else whole // 2
    return request


def play(world: World, operations: list[Operation]) -> None:
    for index, (name, argument) in enumerate(operations):
        if name == "add":
            world.add(make(index, argument, world.limits.max_model_len))
        elif name == "step":
            for _ in range(argument):
                world.step()
        elif name == "budget" and world.limits.enable_chunked_prefill:
            # Fewer tokens than running requests: what a scheduler of its own never gets into.
            world.set_budget(argument)
        elif name == "reset":
            held = world.scheduler.kv_cache.pool.num_owned
            assert world.scheduler.reset_prefix_cache() is (held == 0)
            if not held:
                world.naive.content.clear()
        elif name != "budget":
            living = sorted(world.scheduler.requests)
            if living:
                victim = living[argument % len(living)]
                world.abort(victim) if name == "abort" else world.step(abort_meanwhile=victim)
                assert world.finished[victim] is FinishReason.ABORT
    world.finish()


# Stages, and whether a step is planned ahead.
PIPELINES = st.sampled_from([(1, False), (1, True), (1, True), (2, False), (2, True), (3, True)])
WINDOWS = st.sampled_from([(None,), (None,), (1,), (7,), (None, 5), (3, None, 3), (None, 4, 9, 4), (2, 6)])


@settings(max_examples=350, deadline=None)
@given(
    limits(),
    st.integers(2, 24),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([True, True, False]),
    WINDOWS,
    # Steps until age counts, and between two displacements: as they are, or so few that a small world gets there.
    st.sampled_from([(64, 64), (3, 2), (2, 9)]),
    PIPELINES,
    OPERATIONS,
)
def test_any_world_agrees_with_the_naive_model_and_with_solo_runs(
    limits: SchedulerLimits,
    num_blocks: int,
    block_size: int,
    caching: bool,
    windows: Windows,
    patience: tuple[int, int],
    pipeline: tuple[int, bool],
    operations: list[Operation],
) -> None:
    with (
        mock.patch.object(queue, "AGE_STEPS", patience[0]),
        mock.patch.object(policy, "STEPS_BETWEEN_DISPLACEMENTS", patience[1]),
    ):
        size, (stages, ahead) = num_blocks * len(windows), pipeline
        world = World(limits, size, block_size, caching=caching, windows=windows, stages=stages, ahead=ahead)
        try:
            play(world, operations)
        finally:
            world.close()


@pytest.mark.parametrize(("stages", "ahead"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6), (9, None, 9), (3, None, 12, 3)], ids=str)
def test_crowded_worlds(windows: Windows, stages: int, ahead: bool) -> None:
    """Requests that come while others run, on prefixes that half of them share, in a pool that is too small for all."""
    preemptions = hits = planned_ahead = 0
    for seed in range(12):
        rng = random.Random(seed)
        limits = SchedulerLimits(max_num_seqs=5, max_num_batched_tokens=rng.choice([3, 8, 20]), max_model_len=60)
        layout = KVLayout(rng.choice([2, 4]), windows, limits.max_num_batched_tokens)
        num_blocks = layout.peak_blocks(59) + rng.randrange(3)
        world = World(limits, num_blocks, layout.block_size, windows=windows, stages=stages, ahead=ahead)
        operations: list[Operation] = []
        for _ in range(30):
            kind = {"family": rng.randrange(2), "length": rng.randint(1, 35), "own": rng.randrange(3), "client": 0}
            kind |= {"max_tokens": rng.randint(1, 20), "min_tokens": 0, "stops": False, "salt": None, "resumed": 0}
            kind |= {"prompt_logprobs": None, "priority": rng.choice([0, 0, 0, 3])}
            operations += [("add", kind), ("step", rng.randrange(8))]
            if rng.random() < 0.1:
                operations.append(("abort while it runs", rng.randrange(30)))
        try:
            play(world, operations)
        finally:
            world.close()
        preemptions += world.stats.num_preemptions
        hits += world.stats.prefix_cache_hits
        planned_ahead += world.num_planned_ahead
    assert (planned_ahead > 500) is ahead
    assert preemptions > 10 and hits > 100


def test_the_worlds_reach_what_they_are_for() -> None:
    """Fixed worlds in which preemptions, prefix hits, a stop, displacements and turns by age happen."""
    limits = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=2, max_model_len=40)
    world = World(limits, num_blocks=12, block_size=4)
    kind = {
        "own": 0,
        "max_tokens": 20,
        "min_tokens": 0,
        "salt": None,
        "resumed": 0,
        "client": 0,
        "prompt_logprobs": None,
    }
    for index, (family, length) in enumerate([(0, 12), (0, 13), (1, 3), (0, 12), (2, 9), (1, 5)]):
        world.add(make(index, {**kind, "family": family, "length": length, "stops": index == 5}, 40))
    while world.scheduler.has_requests():
        world.step()
    stats = world.scheduler.make_stats()
    world.finish()
    world.close()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    assert world.finished["r5"] is FinishReason.STOP

    world = World(dataclasses.replace(limits, max_num_batched_tokens=16), num_blocks=30, block_size=4)
    with mock.patch.object(queue, "AGE_STEPS", 3):
        for index in range(40):
            urgent = {"family": index % 3, "length": 4, "stops": False, "priority": 5 if index < 8 else 0}
            world.add(make(index, {**kind, **urgent}, 40))
            world.step()
        world.finish()
    world.close()
    assert world.num_displacements > 0 and world.num_turns_by_age > 0


def test_the_scripted_model_depends_on_every_token() -> None:
    assert len({scripted_token([1, 2, 3]), scripted_token([1, 2, 4]), scripted_token([0, 2, 3])}) == 3
