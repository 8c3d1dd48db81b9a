"""The scheduler drives a scripted executor to the same tokens as one request alone."""

from __future__ import annotations

from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import Scheduler
from evensong.testing.fake_executor import FakeExecutor, scripted_token


def run(
    num_blocks: int, budget: int, prompts: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], int, FakeExecutor]:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=num_blocks * 4)
    scheduler = Scheduler(limits, KVCacheManager(num_blocks, 4, fingerprint="f"), check=True)
    executor = FakeExecutor()
    executor.initialize_from_config(KVCacheConfig(num_blocks, 4), 100)
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        scheduler.add_request(EngineCoreRequest(str(index), prompt, SamplingParams(max_tokens=max_tokens, seed=1)))
        outputs[str(index)] = []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        executor.execute_model(plan).result()
        for output in scheduler.update_from_output(plan, executor.sample_tokens(None).result()).get(0, []):
            assert output.start == len(outputs[output.request_id])
            outputs[output.request_id] += output.new_token_ids
    executor.shutdown()
    assert scheduler.check_kv_cache()["owned"] == 0
    return list(outputs.values()), scheduler.make_stats().num_preemptions, executor


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(scripted_token(tokens))
    return tokens[len(prompt) :]


def test_preempted_and_chunked_requests_get_their_own_tokens() -> None:
    prompts = [[7] * n for n in (3, 9, 14, 5, 21, 8)]
    outputs, preemptions, _ = run(num_blocks=16, budget=6, prompts=prompts, max_tokens=20)
    assert preemptions > 0
    assert outputs == [alone(prompt, 20) for prompt in prompts]


def test_a_shared_prefix_is_computed_once() -> None:
    shared = list(range(100, 140))
    prompts = [[*shared, 200 + i] for i in range(6)]
    outputs, _, executor = run(num_blocks=200, budget=16, prompts=prompts, max_tokens=2)
    assert outputs == [alone(prompt, 2) for prompt in prompts]
    # 40 shared tokens once, then one token each, then the decode steps.
    assert executor.num_computed_tokens == 40 + 6 + 6
