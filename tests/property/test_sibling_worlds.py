"""Random worlds of requests with several choices: every read of the cache is checked, every answer is the solo one."""

from __future__ import annotations

import random
from collections import deque
from unittest import mock

import pytest

from evensong.kvcache.layout import KVLayout
from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import ModelOutput, SchedulerOutput
from evensong.scheduler import policy, queue
from evensong.scheduler.ahead import make_ahead
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import Scheduler
from tests.property.naive_scheduler import Windows
from tests.property.paged_executor import PagedExecutor
from tests.property.world import solo

MAX_MODEL_LEN = 60


class Siblings:
    """A scheduler with its executor, and everything that it answered."""

    def __init__(self, rng: random.Random, windows: Windows, stages: int, ahead: bool) -> None:
        limits = SchedulerLimits(
            max_num_seqs=rng.choice([2, 5, 9]),
            max_num_batched_tokens=rng.choice([3, 8, 20, 60]),
            max_model_len=MAX_MODEL_LEN,
            max_num_queued_reqs=1000,
        )
        layout = KVLayout(rng.choice([1, 2, 4]), windows, limits.max_num_batched_tokens)
        num_blocks = layout.peak_blocks(MAX_MODEL_LEN - 1) + rng.choice([0, 3, 60])
        kv_cache = KVCacheManager(
            num_blocks,
            layout.block_size,
            fingerprint="f",
            enable_prefix_caching=rng.random() < 0.5,
            windows=windows,
            max_step_tokens=limits.max_num_batched_tokens,
        )
        rules = make_ahead(stages, stages + ahead, limits.max_model_len)
        self.scheduler = Scheduler(limits, kv_cache, ahead=rules, check=True)
        self.executor = PagedExecutor(num_stages=stages, steps_ahead=int(ahead))
        self.in_flight: deque[tuple[SchedulerOutput, ModelOutput]] = deque()
        groups = tuple(LayerGroup(window) for window in windows)
        self.executor.initialize_from_config(KVCacheConfig(num_blocks, layout.block_size, groups), limits.max_model_len)
        self.sources: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.num_copies = 0

    def add(self, rng: random.Random, number: int) -> None:
        """A request of 1 to 5 choices, half of whose prompt others may have too."""
        prompt = [rng.randrange(2)] * rng.randint(1, 30) + [500 + number] * rng.randrange(4)
        n, priority = rng.randint(1, 5), rng.choice([0, 0, 0, 3, -2])
        for index in range(n):
            params = SamplingParams(
                seed=index,
                max_tokens=rng.choice([1, 2, 9, 20]),
                stop_token_ids=list(range(10, 1000, 2)) if rng.random() < 0.2 else None,
                prompt_logprobs=0 if index == 0 and number % 5 == 0 else None,
                skip_reading_prefix_cache=True if number % 7 == 0 else None,
            )
            group = f"g{number}" if n > 1 else ""
            source = EngineCoreRequest(f"{index}_{number}", prompt, params, priority=priority, group=group)
            self.sources[source.request_id], self.tokens[source.request_id] = source, []
            self.scheduler.add_request(source)

    def step(self, abort: str | None = None) -> None:
        """Plans while there is room, and applies one step; `abort` goes just before that."""
        while len(self.in_flight) < self.executor.max_concurrent_batches:
            plan = self.scheduler.schedule()
            if not plan.num_scheduled_tokens:
                break
            self.num_copies += len(plan.block_copies)
            self.executor.pipeline.begin(plan)
            self.executor._execute(plan)
            self.executor.pipeline.sample()
            self.in_flight.append((plan, self.executor._sample()))
        assert self.in_flight, "a step that does nothing"
        if abort is not None:
            self._record(self.scheduler.finish_requests([abort], FinishReason.ABORT))
        plan, output = self.in_flight.popleft()
        self.executor.pipeline.take()
        self._record(self.scheduler.update_from_output(plan, output))

    def _record(self, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        for new in outputs.values():
            for one in new:
                assert one.start == len(self.tokens[one.request_id])
                self.tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one.finish_reason


@pytest.mark.parametrize(("stages", "ahead"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6), (1, None, 9), (3, 3)], ids=str)
def test_every_choice_gets_what_it_gets_alone(windows: Windows, stages: int, ahead: bool) -> None:
    copies = preemptions = 0
    with mock.patch.object(queue, "AGE_STEPS", 5), mock.patch.object(policy, "STEPS_BETWEEN_DISPLACEMENTS", 3):
        for seed in range(30):
            rng = random.Random(seed)
            world = Siblings(rng, windows, stages, ahead)
            try:
                for number in range(12):
                    world.add(rng, number)
                    for _ in range(rng.randrange(6)):
                        if world.scheduler.has_requests():
                            living = sorted(world.scheduler.requests)
                            world.step(rng.choice(living) if rng.random() < 0.1 else None)
                for _ in range(5000):
                    if not world.scheduler.has_requests() and not world.in_flight:
                        break
                    world.step()
                for name, source in world.sources.items():
                    expected = solo(source, MAX_MODEL_LEN)
                    if world.finished[name] is FinishReason.ABORT:
                        expected = expected[: len(world.tokens[name])]
                    assert world.tokens[name] == expected, (seed, name)
                assert world.scheduler.check_kv_cache()["owned"] == 0
                copies += world.num_copies
                preemptions += world.scheduler.make_stats().num_preemptions
            finally:
                world.executor.shutdown()
    assert copies > 50 and preemptions > 50
