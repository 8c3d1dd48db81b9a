"""Random worlds of people: priorities, tenants, time limits and aborts in one core.

Whoever is not over its time ends with the bytes that it has alone, whoever is has a beginning of them; nobody is
displaced twice in 64 steps or starves; no block is lost.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from evensong.engine.core.core import EngineCore
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.tenants import tenant_id
from evensong.scheduler.policy import STEPS_BETWEEN_DISPLACEMENTS
from evensong.scheduler.queue import AGE_STEPS, MAX_OVERTAKES
from tests.property.paged_executor import PagedExecutor
from tests.property.world import solo
from tests.unit.engine.core.making import make_core

MAX_MODEL_LEN = 64
SECONDS_PER_STEP = 0.05


class People:
    """A core on a clock of its own: each step takes the same time."""

    def __init__(self, rng: random.Random, **settings: Any) -> None:
        limits = {
            "max_num_seqs": rng.choice([1, 2, 4, 8]),
            "num_kv_blocks_override": rng.choice([20, 40, 200]),
            "block_size": 4,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": rng.choice([8, 16, 64]),
        }
        self.core: EngineCore = make_core(PagedExecutor(), **(limits | settings))
        self.now = 0.0
        self.core.deadlines._clock = lambda: self.now
        self.rng = rng
        self.sources: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.num_steps = 0
        self.num_displacements = 0
        self._displaced: dict[str, int] = {}

    def add(self, **fields: Any) -> str:
        """A random request, except for `fields`; its id."""
        rng = self.rng
        length = rng.randint(1, 30)
        params = SamplingParams(seed=1, max_tokens=rng.randint(1, 30), ignore_eos=True)
        request = EngineCoreRequest(f"r{len(self.sources)}", [rng.randrange(3)] * length, params)
        for name, value in fields.items():
            setattr(request, name, value)
        assert self.core.add_request(request).refusal is None
        self.sources[request.request_id] = request
        self.tokens[request.request_id] = []
        return request.request_id

    def step(self) -> None:
        """One step of the core; displacements are checked."""
        outputs, _ = self.core.step()
        self.record(outputs)
        self.now += SECONDS_PER_STEP
        self.num_steps += 1
        for request in self.core.scheduler.waiting:
            step = request.rank.displaced_step
            before = self._displaced.get(request.request_id)
            if step is not None and step != before:
                assert before is None or step - before >= STEPS_BETWEEN_DISPLACEMENTS
                self._displaced[request.request_id] = step
                self.num_displacements += 1
        self.core.scheduler.check_kv_cache()

    def record(self, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        """Keeps what came, which must be in order."""
        for output in outputs.get(0, []):
            assert output.request_id not in self.ends and output.start == len(self.tokens[output.request_id])
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def close(self) -> None:
        """Steps to the end, then everything is checked."""
        until = self.num_steps + sum(len(source.prompt_token_ids) + 40 for source in self.sources.values())
        while self.core.scheduler.has_requests():
            self.step()
            assert self.num_steps < until, "slower than one after the other"
        for request_id, source in self.sources.items():
            alone, end = solo(source, MAX_MODEL_LEN), self.ends[request_id]
            assert self.tokens[request_id] == alone[: len(self.tokens[request_id])]
            assert len(self.tokens[request_id]) == len(alone) or end.finish_reason is FinishReason.ABORT
            if end.stop_reason == "queue_timeout":
                assert not self.tokens[request_id]
        assert self.core.scheduler.check_kv_cache()["owned"] == 0
        self.core.shutdown()


@pytest.mark.parametrize("seed", range(24))
def test_any_world_of_people(seed: int) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = {"fair_share": rng.choice(["none", "user"])}
    if settings["fair_share"] == "user":
        settings["tenant_weights"] = rng.choice([None, '{"alice": 4, "bob": 0.5}'])
    settings["request_timeout"] = rng.choice([None, 20.0])
    settings["queue_timeout"] = rng.choice([None, None, 3.0])
    world = People(rng, **settings)
    for _ in range(rng.randint(20, 80)):
        world.add(
            priority=rng.choice([0, 0, 1, 5, -(2**40)]),
            tenant=tenant_id(rng.choice(["alice", "bob", ""])),
            timeout=rng.choice([0.0, 0.0, 0.5, 4.0]),
        )
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.1 and world.core.scheduler.requests:
            world.record(
                world.core.finish_requests([rng.choice(list(world.core.scheduler.requests))], FinishReason.ABORT)
            )
    world.close()


def test_the_worlds_reach_what_they_are_for() -> None:
    displacements, reasons = 0, set()
    for seed in range(24):
        rng = random.Random(seed)
        world = People(rng, max_num_seqs=2, queue_timeout=2.0)
        for _ in range(40):
            world.add(priority=rng.choice([0, 5]), timeout=rng.choice([0.0, 1.0]))
            world.step()
        world.close()
        displacements += world.num_displacements
        reasons |= {(end.finish_reason, end.stop_reason) for end in world.ends.values()}
        if displacements and len(reasons) >= 3:
            break
    assert displacements > 0
    assert {(FinishReason.ABORT, "timeout"), (FinishReason.ABORT, "queue_timeout")} < reasons


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fair_share", ["none", "user"])
def test_a_flood_of_urgent_requests_starves_nobody(seed: int, fair_share: str) -> None:
    """Without end every slot is wanted by urgent requests. A low one begins within the stated bound, and ends.

    The bound: AGE_STEPS steps, and then one slot in MAX_OVERTAKES + 1 for each low one that came before it.
    """
    rng = random.Random(seed)
    world = People(rng, fair_share=fair_share, num_kv_blocks_override=200)
    slots = world.core.scheduler.limits.max_num_seqs

    def flood() -> None:
        while len(world.core.scheduler.waiting) < 2 * slots + 3:
            world.add(priority=0)

    flood()
    world.step()
    low = [world.add(priority=5) for _ in range(3)]
    begun_before, waited = None, 0
    while not all(one in world.ends for one in low):
        flood()
        world.step()
        waited += 1
        if waited == AGE_STEPS:
            begun_before = len(world.tokens)
        assert waited < 4000, "a low request starves"
        if begun_before is not None and not all(world.tokens[one] for one in low):
            started = sum(1 for tokens in list(world.tokens.values())[begun_before:] if tokens)
            assert started <= (MAX_OVERTAKES + 1) * len(low) * 2 + 2 * slots
    world.core.finish_requests(list(world.core.scheduler.requests), FinishReason.ABORT)
    assert all(world.tokens[one] == solo(world.sources[one], MAX_MODEL_LEN) for one in low)
    assert world.core.scheduler.check_kv_cache()["owned"] == 0
    world.core.shutdown()
