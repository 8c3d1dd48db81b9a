"""The contract on the real model: tokens and log-probabilities of a request are the same in every world, ==.

`make soak` draws worlds for as long as asked; this is the bounded sample.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.property.worlds import Case, World, make_cases, random_world, run_solo, run_world

NUM_CASES = 24


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(seed=1, count=NUM_CASES, max_tokens=20)


@pytest.fixture(scope="module")
def solo(cases: list[Case], demo_model: Path) -> dict[int, tuple[Any, ...]]:
    return run_solo(cases)


WORLDS: dict[str, dict[str, Any]] = {
    "one batch": {"max_num_batched_tokens": 2048},
    "chunks of 16 tokens": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "a tiny pool that preempts": {"num_kv_blocks_override": 24, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_changes_nothing(name: str, cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    answers, blocks = run_world(World(WORLDS[name], [0] * len(cases)), cases)
    assert answers == solo
    assert blocks["owned"] == 0


def test_cache_hits_change_nothing(cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    """The second round finds every full block of the first one in the cache."""
    arrivals = [0] * len(cases) + [10_000] * len(cases)
    answers, blocks = run_world(World({"max_num_batched_tokens": 256}, arrivals), cases * 2)
    assert blocks["cached"] > 0
    for index in range(len(cases)):
        assert answers[index] == solo[index] and answers[index + len(cases)] == solo[index]


def test_displacement_changes_nothing(cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    """Two slots, and each arrival is more urgent than those before: nearly everyone is displaced."""
    cases = cases[:10]
    world = World({"max_num_seqs": 2, "max_num_batched_tokens": 64}, list(range(0, 2 * len(cases), 2)))
    world.priorities = {index: -index for index in range(len(cases))}
    answers, blocks = run_world(world, cases)
    assert answers == {index: solo[index] for index in range(len(cases))}
    assert blocks["owned"] == 0


def test_random_worlds_change_nothing(cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    rng = random.Random(7)
    for _ in range(2):
        world = random_world(rng, cases)
        answers, blocks = run_world(world, cases)
        assert set(range(len(cases))) - set(world.aborts) <= set(answers), world
        for index, answer in answers.items():
            assert answer == solo[index] or index in world.aborts, (world, index)
        assert blocks["owned"] == 0
