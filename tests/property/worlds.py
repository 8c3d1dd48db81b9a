"""Worlds for the determinism contract: the same requests in other batches, chunks, pools and caches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from evensong.config.resolve import EngineArgs
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams

SHARED = (
    "You are a careful assistant. Answer in short sentences, name the sources that you know, and say so when you do "
    "not know something. Never repeat the question. "
)
TOPICS = (
    "the tides and the moon",
    "how bread rises",
    "why leaves turn red in autumn",
    "the history of the printing press",
    "日本の四季 🍁",
    "def fibonacci(n):",
    "what makes glass transparent",
    "counting sheep: 1, 2, 3,",
)


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: str
    params: SamplingParams


@dataclass
class World:
    """Engine settings, at which step which request arrives or is aborted, and how urgent each is.

    `environment`: variables that are set while the engine is made.
    """

    settings: dict[str, Any]
    arrivals: list[int]
    aborts: dict[int, int] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def with_settings(self, settings: dict[str, Any]) -> World:
        """The same with further settings."""
        return replace(self, settings={**self.settings, **settings})


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "likes": {"enum": ["日本", "😀", "tea"]}},
    "required": ["name", "age", "likes"],
}


def make_cases(seed: int, count: int, max_tokens: int) -> list[Case]:
    """Greedy, sampled, penalised, biased, masked, constrained and stopped requests; half of them share a beginning."""
    rng = random.Random(seed)
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 8},
        {"temperature": 0.9, "logit_bias": {260: 2.0, 281: -3.0}, "stop": ["\n\n"]},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.0, "bad_words": ["the", "is a", "."]},
        {"temperature": 1.0, "allowed_token_ids": list(range(0, 49152, 7)), "bad_words": ["a"]},
        {"temperature": 1.0, "structured_outputs": {"json": PERSON}},
        {"temperature": 0.0, "structured_outputs": {"regex": "[a-z ]{20,60}"}, "repetition_penalty": 1.3},
    ]
    cases = []
    for index in range(count):
        style = styles[index % len(styles)]
        prompt = (SHARED if rng.random() < 0.5 else "") + f"Write about {rng.choice(TOPICS)}"
        logprobs = style.get("logprobs", rng.choice([None, 0, 3]))
        length = rng.randint(max_tokens // 2, max_tokens)
        scored = {"prompt_logprobs": rng.choice([0, 2])} if index % 5 == 4 else {}
        settings = {**style, **scored, "logprobs": logprobs, "max_tokens": length, "seed": rng.randrange(2**62)}
        cases.append(Case(prompt, SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)))
    return cases


def answer_of(output: RequestOutput, index: int = 0) -> tuple[Any, ...]:
    """Everything of an output's choice that the contract covers."""
    choice = output.outputs[index]
    logprobs = [*(choice.logprobs or ()), *(output.prompt_logprobs or ())]
    positions = [at and sorted((i, p.logprob, p.rank) for i, p in at.items()) for at in logprobs]
    return choice.text, tuple(choice.token_ids), positions, choice.finish_reason, choice.stop_reason


def run_world(world: World, cases: list[Case]) -> tuple[dict[int, tuple[Any, ...]], dict[str, int]]:
    """Answers by case index (aborted ones left out), and the KV cache's block counts at the end."""
    engine = make_engine(world.settings, world.environment)
    answers: dict[int, tuple[Any, ...]] = {}
    try:
        waiting = sorted(range(len(cases)), key=lambda index: world.arrivals[index])
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (world.arrivals[waiting[0]] <= step or not engine.has_unfinished_requests()):
                index = waiting.pop(0)
                urgency = world.priorities.get(index, 0)
                engine.add_request(str(index), cases[index].prompt, cases[index].params, priority=urgency)
            engine.abort_request([str(index) for index, when in world.aborts.items() if when == step])
            for output in engine.step():
                answers[int(output.request_id)] = answer_of(output)
            step += 1
        return answers, engine.call_verb("check_kv_cache")
    finally:
        engine.shutdown()


def make_engine(settings: dict[str, Any], environment: dict[str, str] | None = None) -> LLMEngine:
    """An engine of the demo model in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        return LLMEngine.from_engine_args(EngineArgs("demo", log_level="warning", **settings), multiprocess=False)


def run_solo(
    cases: list[Case], environment: dict[str, str] | None = None, **settings: Any
) -> dict[int, tuple[Any, ...]]:
    """Each case alone in an engine that remembers no prefix."""
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, **settings}
    answers: dict[int, tuple[Any, ...]] = {}
    engine = make_engine(settings, environment)
    try:
        for index, case in enumerate(cases):
            engine.add_request(str(index), case.prompt, case.params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    answers[index] = answer_of(output)
        return answers
    finally:
        engine.shutdown()


def random_world(rng: random.Random, cases: list[Case]) -> World:
    """Other limits, another pool (sometimes too small for all), other arrivals, some aborts."""
    block_size = rng.choice([4, 16, 32])
    settings: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": rng.choice([2, 5, 16, 64]),
        "max_num_batched_tokens": rng.choice([7, 16, 33, 128, 512]),
        "enable_prefix_caching": rng.random() < 0.7,
        "num_kv_blocks_override": rng.choice([256, 400, 4000]) // block_size + 1,
        "long_prefill_token_threshold": rng.choice([0, 0, 5]),
        "enforce_eager": rng.random() < 0.2,
        "async_scheduling": rng.random() < 0.7,
        "pipeline_parallel_size": rng.choice([1, 1, 1, 2]),
    }
    arrivals = [rng.choice([0, 0, rng.randrange(40)]) for _ in cases]
    aborted = rng.sample(range(len(cases)), k=rng.randrange(0, max(1, len(cases) // 4)))
    aborts = {index: arrivals[index] + rng.randrange(1, 20) for index in aborted}
    # Half of the worlds are first come, first served.
    urgent = {index: rng.choice([-5, 0, 3]) for index in range(len(cases))} if rng.random() < 0.5 else {}
    return World(settings, arrivals, aborts, urgent, {"OMP_NUM_THREADS": rng.choice(["1", "2"])})
