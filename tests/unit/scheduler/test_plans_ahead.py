"""Several plans in flight, and what a step costs: what a pipelined loop needs from the scheduler."""

from __future__ import annotations

import time
from typing import Any

from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup
from evensong.protocol.output import FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import ModelOutput, SchedulerOutput
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import Scheduler
from evensong.testing.fake_executor import FakeExecutor, scripted_token

PROMPT = list(range(100, 116))


def make(num_blocks: int = 16, **limits: Any) -> Scheduler:
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    return Scheduler(SchedulerLimits(**(settings | limits)), KVCacheManager(num_blocks, 4, fingerprint="f"), check=True)


def ask(request_id: str, prompt: list[int], max_tokens: int = 8) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=1))


def ran(plan: SchedulerOutput, token_id: int = 7) -> ModelOutput:
    count = len(plan.sampling_request_ids)
    return ModelOutput(list(plan.sampling_request_ids), [[token_id]] * count, [None] * count)


def cached(scheduler: Scheduler) -> int:
    return scheduler.check_kv_cache()["cached"]


def test_a_step_shows_only_what_it_computed_itself() -> None:
    """With two chunks in flight the first result must not show the second chunk's blocks."""
    scheduler = make()
    scheduler.add_request(ask("r", PROMPT))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.num_scheduled_tokens == second.num_scheduled_tokens == {"r": 8}
    scheduler.update_from_output(first, ran(first))
    assert cached(scheduler) == 2
    scheduler.update_from_output(second, ran(second))
    assert cached(scheduler) == 4


def test_windows_pass_while_plans_are_in_flight() -> None:
    """Blocks that a plan gives back are used again by plans that run after those which still read them."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)
    windows = (None, 6, 3)
    kv_cache = KVCacheManager(30, 4, fingerprint="f", windows=windows, max_step_tokens=8)
    scheduler = Scheduler(limits, kv_cache, check=True)
    executor = FakeExecutor()
    executor.initialize_from_config(KVCacheConfig(30, 4, tuple(LayerGroup(window) for window in windows)), 64)
    for name in "ab":
        scheduler.add_request(ask(name, [*PROMPT, *PROMPT, ord(name)], max_tokens=12))
    sent: dict[str, list[int]] = {"a": [], "b": []}
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    while scheduler.has_requests():
        while len(in_flight) < 2:
            plan = scheduler.schedule()
            executor._execute(plan)
            in_flight.append((plan, executor._sample()))
        for outputs in scheduler.update_from_output(*in_flight.pop(0)).values():
            for output in outputs:
                sent[output.request_id] += output.new_token_ids
    executor.shutdown()
    for name, tokens in sent.items():
        expected = [*PROMPT, *PROMPT, ord(name)]
        for token in tokens:
            assert token == scripted_token(expected)
            expected.append(token)
        assert len(tokens) == 12
    assert scheduler.check_kv_cache()["owned"] == 0


def test_a_request_whose_token_is_on_its_way_does_not_hold_up_others() -> None:
    scheduler = make()
    scheduler.add_request(ask("a", [1, 2, 3]))
    first = scheduler.schedule()
    scheduler.add_request(ask("b", [4, 5, 6]))
    # a's next token is not known yet: nothing of it can be planned.
    assert scheduler.schedule().num_scheduled_tokens == {"b": 3}
    outputs = scheduler.update_from_output(first, ran(first))
    assert [output.new_token_ids for output in outputs[0]] == [[7]]
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_results_of_a_slot_that_was_given_up_are_not_for_the_next_one() -> None:
    """The name is in use again, in other blocks, when the old plan's result comes."""
    scheduler = make()
    scheduler.add_request(ask("r", PROMPT[:8]))
    old = scheduler.schedule()
    scheduler.finish_requests(["r"], FinishReason.ABORT)
    scheduler.add_request(ask("r", PROMPT[:8]))
    new = scheduler.schedule()
    assert new.released_request_ids == ["r"] and [data.request_id for data in new.new_requests] == ["r"]
    assert scheduler.update_from_output(old, ran(old)) == {}
    assert cached(scheduler) == 0
    outputs = scheduler.update_from_output(new, ran(new, 9))
    assert [output.new_token_ids for output in outputs[0]] == [[9]]
    assert cached(scheduler) == 2


def test_a_request_that_waits_again_gets_nothing_from_before_its_preemption() -> None:
    scheduler = make(num_blocks=4, max_num_batched_tokens=16, max_model_len=16)
    scheduler.add_request(ask("a", PROMPT[:8]))
    scheduler.add_request(ask("b", PROMPT[8:]))
    plan = scheduler.schedule()
    assert set(plan.num_scheduled_tokens) == {"a", "b"}
    scheduler.update_from_output(plan, ran(plan))
    # Each wants a third block and there is none: the newest gives way, in the plan that is under way next.
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1} and plan.released_request_ids == ["b"]
    late = SchedulerOutput(plan.step_id - 1, [], plan.cached_requests, {"a": 1}, ["b"], [])
    late.cached_requests = type(plan.cached_requests)([], [], [])
    assert scheduler.update_from_output(late, ModelOutput(["b"], [[5]], [None])) == {}
    assert scheduler.requests["b"].token_ids == [*PROMPT[8:], 7]


def test_a_request_starts_only_where_all_its_tokens_fit() -> None:
    """Else a preempted one would come back at once into the blocks that it gave up, and lose them again."""
    scheduler = make(num_blocks=6, max_num_batched_tokens=4, max_model_len=24)
    scheduler.add_request(ask("a", PROMPT[:8], max_tokens=4))
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, ran(plan))
    scheduler.add_request(ask("b", list(range(200, 217)), max_tokens=2))
    # Four blocks are free and its first chunk takes one, but it will need five.
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    assert scheduler.schedule().num_scheduled_tokens == {"b": 4}


def test_requests_behind_a_writer_keep_their_place_before_later_ones() -> None:
    scheduler = make(num_blocks=64, max_num_seqs=2)
    scheduler.add_request(ask("writer", [*PROMPT, 1]))
    scheduler.schedule()
    scheduler.add_request(ask("behind", [*PROMPT, 2]))
    scheduler.add_request(ask("later", [3]))
    scheduler.limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    # The second slot is kept for the one that came first.
    assert scheduler.schedule().num_scheduled_tokens == {"writer": 9}
    scheduler.limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64)
    assert scheduler.schedule().num_scheduled_tokens == {"later": 1}


def test_an_output_that_came_along_complete_is_refused() -> None:
    scheduler = make()
    request = ask("r", [1, 2], max_tokens=2)
    request.output_token_ids = [5, 6]
    try:
        scheduler.add_request(request)
    except ValueError as error:
        assert "max_tokens is 2" in str(error)
    else:
        raise AssertionError("nothing is left to generate")
    assert not scheduler.has_requests()


def test_planning_and_updating_64_decodes_costs_a_fraction_of_a_step() -> None:
    """About 0.4 ms on a quiet core; the bound leaves room for a busy machine, and none for anything quadratic."""
    scheduler = Scheduler(SchedulerLimits(64, 64 * 128, 1024), KVCacheManager(4000, 16, fingerprint="f"))
    for index in range(64):
        scheduler.add_request(ask(str(index), list(range(index, index + 128)), max_tokens=800))
    best = float("inf")
    for _ in range(100):
        start = time.perf_counter()
        plan = scheduler.schedule()
        output = ran(plan)
        scheduler.update_from_output(plan, output)
        best = min(best, time.perf_counter() - start)
    assert len(scheduler.running) == 64
    assert best < 0.003
