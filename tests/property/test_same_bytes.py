"""The contract on the real model: tokens and log-probabilities of a request are the same in every world, ==.

`make soak` draws worlds for as long as asked; this is the bounded sample.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evensong import _native
from evensong.engine.frontend.input_processor import child_seed
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.property.worlds import Case, World, answer_of, make_cases, make_engine, random_world, run_solo, run_world

NUM_CASES = 24
ISAS: list[str] = _native.supported_isas()


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
    "one step after the other": {"async_scheduling": False},
    "stages of a pipeline, in which a tiny pool preempts": {
        "pipeline_parallel_size": 2,
        "num_kv_blocks_override": 24,
        "max_num_batched_tokens": 64,
    },
    "one step after the other, preempting": {
        "async_scheduling": False,
        "num_kv_blocks_override": 24,
        "max_num_batched_tokens": 64,
    },
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_changes_nothing(name: str, cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    answers, blocks = run_world(World(WORLDS[name], [0] * len(cases)), cases)
    assert answers == solo
    assert blocks["owned"] == 0


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_are_planned_ahead_where_they_may_be(ahead: bool, cases: list[Case]) -> None:
    """What the worlds compare is not the same thing twice: with one step ahead nearly all decode steps are."""
    engine = make_engine({"async_scheduling": ahead})
    client: Any = engine._client
    depths: list[int] = []
    take = client._core.steps.take

    def noted() -> Any:
        depths.append(len(client._core.steps))
        return take()

    client._core.steps.take = noted
    try:
        for index, case in enumerate(cases[:6]):
            engine.add_request(str(index), case.prompt, case.params)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        engine.shutdown()
    assert len(depths) > 10
    assert depths.count(2) > len(depths) * 0.8 if ahead else set(depths) == {1}


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


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_strangers_change_nothing(batch: int, cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    """A request in a batch of others that have nothing in common with it."""
    own = 7  # greedy, with log-probabilities
    crowd = [*make_cases(seed=99, count=batch - 1, max_tokens=24), cases[own]]
    answers, _ = run_world(World({"max_num_seqs": 64, "max_num_batched_tokens": 2048}, [0] * batch), crowd)
    assert answers[batch - 1] == solo[own]


CHOICES = 3


@pytest.fixture(scope="module")
def solo_choices(cases: list[Case], demo_model: Path) -> dict[int, tuple[Any, ...]]:
    """Of the first cases, each choice as a request of its own, in an engine that shares nothing."""
    return run_solo([of_choice(case, index) for case in cases[:10] for index in range(CHOICES)])


def of_choice(case: Case, index: int) -> Case:
    params = case.params.clone()
    params.seed = child_seed(params.seed or 0, index)
    if index:
        params.prompt_logprobs = None
    return Case(case.prompt, params)


CHOICE_WORLDS: dict[str, dict[str, Any]] = {
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
    "cached, in chunks": {"max_num_batched_tokens": 24, "block_size": 32},
    "a tiny pool that preempts": {"num_kv_blocks_override": 24, "max_num_batched_tokens": 64, "max_num_seqs": 9},
    "a tiny pool without a cache": {
        "enable_prefix_caching": False,
        "num_kv_blocks_override": 60,
        "block_size": 7,
        "max_num_batched_tokens": 40,
    },
}


@pytest.mark.parametrize("name", CHOICE_WORLDS)
def test_choices_that_share_their_prompt_are_what_they_are_alone(
    name: str, cases: list[Case], solo_choices: dict[int, tuple[Any, ...]]
) -> None:
    engine = make_engine(CHOICE_WORLDS[name], {"EVENSONG_CHECK_KV": "1"})
    answers: dict[int, tuple[Any, ...]] = {}
    scheduled: list[int] = []
    try:
        copies = count_copies(engine, scheduled)
        for index, case in enumerate(cases[:10]):
            params = case.params.clone()
            params.n = CHOICES
            engine.add_request(str(index), case.prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                for choice in range(CHOICES):
                    # The first choice's log-probabilities of the prompt are the request's.
                    own = output if choice == 0 else msgspec.structs.replace(output, prompt_logprobs=None)
                    answers[int(output.request_id) * CHOICES + choice] = answer_of(own, choice)
        assert engine.call_verb("check_kv_cache")["owned"] == 0
    finally:
        engine.shutdown()
    assert answers == solo_choices
    assert copies
    if name == "no cache":
        prompts = sum(len(engine.get_tokenizer().encode(case.prompt)) for case in cases[:10])
        produced = sum(len(answer[1]) for answer in answers.values())
        # Each prompt once, one token of it for each sibling, and of each output all but the last token.
        assert sum(scheduled) <= prompts + 10 * (CHOICES - 1) + produced


def count_copies(engine: LLMEngine, scheduled: list[int]) -> list[tuple[int, int]]:
    """The blocks that the engine's plans copy, as they come; `scheduled` gets the tokens of each plan."""
    scheduler = engine._client._core.scheduler  # type: ignore[attr-defined]  # a core in this process
    copies: list[tuple[int, int]] = []
    schedule = scheduler.schedule

    def noted() -> Any:
        plan = schedule()
        copies.extend(plan.block_copies)
        scheduled.append(plan.total_num_scheduled_tokens)
        return plan

    scheduler.schedule = noted
    return copies


def long_cases() -> list[Case]:
    """Prompts of more than 333 tokens, two of them with a common beginning of half that."""
    numbers = [" ".join(str(7 * i % 1000) for i in range(a, a + 150)) for a in (0, 400)]
    prompts = [numbers[0], numbers[1], numbers[0][: len(numbers[0]) // 2] + " and then " + numbers[1]]
    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "seed": 5, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [
        Case(prompt, SamplingParams(max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY, **more))
        for prompt, more in zip(prompts, params, strict=True)
    ]


@pytest.fixture(scope="module")
def long_solo() -> dict[int, tuple[Any, ...]]:
    return run_solo(long_cases(), max_num_batched_tokens=2048)


LONG_WORLDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "chunks of 1": ({"long_prefill_token_threshold": 1}, {}),
    "chunks of 7": ({"long_prefill_token_threshold": 7}, {}),
    "chunks of 16": ({"long_prefill_token_threshold": 16}, {}),
    "chunks of 333": ({"long_prefill_token_threshold": 333, "block_size": 7}, {}),
    "one thread": ({}, {"OMP_NUM_THREADS": "1"}),
    "op by op": ({"enforce_eager": True}, {}),
    "op by op in chunks, one thread": (
        {"enforce_eager": True, "long_prefill_token_threshold": 50},
        {"OMP_NUM_THREADS": "1"},
    ),
}


@pytest.mark.parametrize("name", LONG_WORLDS)
def test_a_world_changes_no_long_prompt(name: str, long_solo: dict[int, tuple[Any, ...]]) -> None:
    settings, environment = LONG_WORLDS[name]
    cases = long_cases()
    world = World({"max_num_batched_tokens": 2048, **settings}, [0] * len(cases), environment=environment)
    assert run_world(world, cases)[0] == long_solo


def test_a_cache_that_is_warm_or_half_warm_changes_nothing(long_solo: dict[int, tuple[Any, ...]]) -> None:
    """The third prompt finds half of itself, the others, the second time, all of theirs."""
    cases = long_cases()
    arrivals = [0, 0, 10_000, 20_000, 20_000, 20_000]
    answers, blocks = run_world(World({"max_num_batched_tokens": 2048}, arrivals), cases * 2)
    assert blocks["cached"] > 0
    assert answers == {index: long_solo[index % 3] for index in range(6)}


@pytest.mark.parametrize(
    ("isa", "dtype", "kv_dtype"),
    [
        *[(isa, "bfloat16", "auto") for isa in ISAS[1:]],
        (ISAS[0], "bfloat16", "float32"),
        (ISAS[0], "float32", "auto"),
        (ISAS[0], "float32", "bfloat16"),
    ],
)
def test_every_instruction_set_and_dtype_against_itself(isa: str, dtype: str, kv_dtype: str) -> None:
    cases = make_cases(seed=2, count=6, max_tokens=8)
    settings: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_dtype}
    environment = {"EVENSONG_CPU_ISA": isa}
    expected = run_solo(cases, environment, **settings)
    tiny = {"num_kv_blocks_override": 24, "max_num_batched_tokens": 64, **settings}
    answers, blocks = run_world(World(tiny, [0] * len(cases), environment=environment), cases)
    assert answers == expected and blocks["owned"] == 0


def test_random_worlds_change_nothing(cases: list[Case], solo: dict[int, tuple[Any, ...]]) -> None:
    rng = random.Random(7)
    for _ in range(2):
        world = random_world(rng, cases)
        answers, blocks = run_world(world, cases)
        assert set(range(len(cases))) - set(world.aborts) <= set(answers), world
        for index, answer in answers.items():
            assert answer == solo[index] or index in world.aborts, (world, index)
        assert blocks["owned"] == 0
