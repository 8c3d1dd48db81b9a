"""Scheduler, KV cache, executor and a tiny real model: every request gets its solo answer in every world, ==."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from evensong.config.sections import EngineConfig, ModelConfig
from evensong.executor.uniproc import UniProcExecutor
from evensong.kvcache.layout import group_layers
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.output import TokenLogprobs
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import Scheduler
from evensong.testing.tiny_models import NUM_TOKENS, TinyLlama, write_tiny_llama

BLOCK = 4
KINDS = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 1},
    {"temperature": 1.1, "top_k": 12, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 6, "logit_bias": {256: 12.0}},
)
Answer = tuple[list[int], list[TokenLogprobs], str]


MODELS = {
    "full attention": TinyLlama(dtype="bfloat16"),
    "a window": TinyLlama(dtype="bfloat16", window=9),
    "a hybrid": TinyLlama(dtype="bfloat16", num_layers=3, window=14, layers_with_window=(0, 2)),
}


@pytest.fixture(scope="module", params=MODELS)
def executor(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[UniProcExecutor]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), MODELS[request.param])
    executor = UniProcExecutor(EngineConfig(model=ModelConfig(model=str(folder), device="cpu")))
    groups = group_layers(executor.get_kv_cache_specs()[0])
    assert len(groups) == (3 if request.param == "a hybrid" else 1)
    executor.initialize_from_config(KVCacheConfig(400 * len(groups), BLOCK, groups), 256)
    yield executor
    executor.shutdown()


def make_requests() -> list[EngineCoreRequest]:
    rng = np.random.default_rng(11)
    shared = rng.integers(0, NUM_TOKENS - 1, 24).tolist()
    requests = []
    for index in range(24):
        own = rng.integers(0, NUM_TOKENS - 1, int(rng.integers(1, 30))).tolist()
        prompt = shared + own if index % 3 == 0 else own
        params = SamplingParams(max_tokens=int(rng.integers(6, 20)), seed=index, **KINDS[index % len(KINDS)])  # type: ignore[arg-type]
        requests.append(EngineCoreRequest(f"r{index}", prompt, params, eos_token_ids=[256]))
    return requests


def run(
    executor: UniProcExecutor, requests: list[EngineCoreRequest], num_blocks: int, budget: int, seats: int
) -> tuple[dict[str, Answer], Scheduler]:
    limits = SchedulerLimits(max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=num_blocks * BLOCK)
    windows = [group.window for group in group_layers(executor.get_kv_cache_specs()[0])]
    kv_cache = KVCacheManager(
        num_blocks * len(windows), BLOCK, fingerprint="f", windows=windows, max_step_tokens=budget
    )
    scheduler = Scheduler(limits, kv_cache, check=True)
    answers: dict[str, Answer] = {request.request_id: ([], [], "") for request in requests}
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_requests():
        plan = scheduler.schedule()
        executor.execute_model(plan)
        for output in scheduler.update_from_output(plan, executor.sample_tokens(None).result()).get(0, []):
            tokens, logprobs, _ = answers[output.request_id]
            tokens += output.new_token_ids
            logprobs += output.new_logprobs or []
            if output.finish_reason is not None:
                answers[output.request_id] = (tokens, logprobs, str(output.finish_reason))
    # The worker learns from the next plan that the last ones are gone.
    executor.execute_model(scheduler.schedule())
    executor.sample_tokens(None).result()
    return answers, scheduler


@pytest.fixture(scope="module")
def solo(executor: UniProcExecutor) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for request in make_requests():
        answers |= run(executor, [request], 100, 256, 1)[0]
    assert {reason for _, _, reason in answers.values()} == {"length", "stop"}
    return answers


@pytest.mark.parametrize(
    "num_blocks, budget, seats",
    [(400, 512, 32), (400, 16, 32), (400, 33, 5), (30, 24, 16), (20, 512, 24)],
    ids=["one batch", "16-token chunks", "few seats", "preempted in a small pool", "preempted in a tiny pool"],
)
def test_every_world_gives_the_solo_answers(
    executor: UniProcExecutor, solo: dict[str, Answer], num_blocks: int, budget: int, seats: int
) -> None:
    answers, scheduler = run(executor, make_requests(), num_blocks, budget, seats)
    assert answers == solo
    if num_blocks <= 30:
        assert scheduler.make_stats().num_preemptions > 0
    assert scheduler.check_kv_cache()["owned"] == 0
