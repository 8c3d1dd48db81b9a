"""The contract for models that several ranks share: each number of parts has bytes of its own, the same in every world.

`make soak ARGS='--settings {"tensor_parallel_size":2}'` draws worlds for as long as asked; this is the bounded sample.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.property.test_same_bytes import WORLDS
from tests.property.worlds import Case, World, make_cases, random_world, run_solo, run_world

TWO_PARTS = {"tensor_parallel_size": 2}
THREE_PARTS = {"tensor_parallel_size": 3}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """One of each style."""
    return make_cases(seed=3, count=12, max_tokens=16)


@pytest.fixture(scope="module")
def two_parts(cases: list[Case], demo_model: Path) -> dict[int, tuple[Any, ...]]:
    return run_solo(cases, **TWO_PARTS)


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_changes_nothing_of_two_parts(
    name: str, cases: list[Case], two_parts: dict[int, tuple[Any, ...]]
) -> None:
    answers, blocks = run_world(World({**WORLDS[name], **TWO_PARTS}, [0] * len(cases)), cases)
    assert answers == two_parts
    assert blocks["owned"] == 0


def test_cache_hits_change_nothing_of_two_parts(cases: list[Case], two_parts: dict[int, tuple[Any, ...]]) -> None:
    arrivals = [*[0] * len(cases), *[10_000] * len(cases)]
    answers, blocks = run_world(World({"max_num_batched_tokens": 256, **TWO_PARTS}, arrivals), cases * 2)
    assert blocks["cached"] > 0
    assert answers == {index: two_parts[index % len(cases)] for index in range(2 * len(cases))}


def test_a_random_world_changes_nothing_of_two_parts(cases: list[Case], two_parts: dict[int, tuple[Any, ...]]) -> None:
    world = random_world(random.Random(11), cases)
    answers, blocks = run_world(world.with_settings(TWO_PARTS), cases)
    assert set(range(len(cases))) - set(world.aborts) <= set(answers), world
    assert {index: answers[index] for index in answers if index not in world.aborts} == {
        index: two_parts[index] for index in answers if index not in world.aborts
    }
    assert blocks["owned"] == 0


def test_three_parts_on_fewer_cores_against_themselves(cases: list[Case], demo_model: Path) -> None:
    few = cases[:4]
    tiny = {"num_kv_blocks_override": 24, "max_num_batched_tokens": 64}
    answers, blocks = run_world(World({**tiny, **THREE_PARTS}, [0] * len(few)), few)
    assert answers == run_solo(few, **THREE_PARTS) and blocks["owned"] == 0
