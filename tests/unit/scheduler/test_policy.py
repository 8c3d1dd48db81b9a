"""Priority: who gets slots and blocks, who gives them up, how often, and that age lets nobody starve."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from evensong.protocol.output import FinishReason
from evensong.scheduler.policy import STEPS_BETWEEN_DISPLACEMENTS, STEPS_BETWEEN_PAUSES, Policy
from evensong.scheduler.queue import AGE_STEPS, MAX_OVERTAKES
from evensong.scheduler.request import Request
from tests.unit.scheduler.driving import Driven, alone, ask


def running(driven: Driven) -> list[str]:
    return [request.request_id for request in driven.scheduler.running]


def full_of_low(**limits: Any) -> Driven:
    """Two slots, both taken by long requests of priority 5."""
    driven = Driven(**({"max_num_seqs": 2, "max_model_len": 512, "num_blocks": 300} | limits))
    for n in range(2):
        driven.scheduler.add_request(ask(f"low{n}", [n + 1] * 4, 300, priority=5))
    driven.step()
    return driven


def runs(request_id: str, urgency: int, **fields: Any) -> Request:
    request = Request(ask(request_id, [1, 2]), priority=urgency)
    for name, value in fields.items():
        setattr(request.rank if name.startswith("displaced") else request.seat, name, value)
    return request


def mixed() -> Policy:
    """A policy that has seen two priorities."""
    policy = Policy()
    for urgency in (0, 1):
        policy.waiting.append(runs(str(urgency), urgency))
    return policy


def test_the_least_urgent_gives_way_and_of_equals_the_newest() -> None:
    policy = mixed()
    order = [runs("a", 5), runs("b", 7), runs("c", 7), runs("d", -3)]
    assert policy.gives_way(order).request_id == "c"
    assert [r.request_id for r in policy.displaceable(order, runs("u", 0), 100)] == ["c", "b", "a"]
    assert policy.displaceable(order, runs("u", 7), 100) == []


def test_while_all_are_equal_nothing_is_sorted_and_nobody_displaced() -> None:
    policy = Policy()
    policy.waiting.append(runs("w", 3))
    order = [runs("b", 3), runs("a", 3)]
    assert policy.plain and policy.order(order, True, 64) == {} and [r.request_id for r in order] == ["b", "a"]
    assert not policy.may_displace(order) and policy.displaceable(order, runs("u", 3), 9) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"first_step_id": 100}, False),
        ({"first_step_id": 99}, True),
        ({"displaced_step": 100 - STEPS_BETWEEN_DISPLACEMENTS + 1, "displaced_tokens": 0}, False),
        ({"displaced_step": 100 - STEPS_BETWEEN_DISPLACEMENTS, "displaced_tokens": 1}, True),
        ({"displaced_step": 1, "displaced_tokens": 2}, False),
    ],
)
def test_who_was_displaced_must_have_run_since(fields: dict[str, Any], expected: bool) -> None:
    assert bool(mixed().displaceable([runs("low", 5, **fields)], runs("u", 0), 100)) is expected


def test_an_urgent_arrival_takes_the_slot_of_the_newest_low_one_in_the_next_step() -> None:
    driven = full_of_low()
    driven.scheduler.add_request(ask("urgent", [9] * 4, 3))
    plan = driven.step()
    # Its first step is its own; the other low one goes on with the next.
    assert list(plan.num_scheduled_tokens) == ["urgent"] and len(driven.tokens("urgent")) == 1
    assert list(driven.step().num_scheduled_tokens) == ["urgent", "low0"]
    assert [r.request_id for r in driven.scheduler.waiting] == ["low1"]
    driven.run()
    assert driven.tokens("low1") == alone([2] * 4, 300) and driven.tokens("urgent") == alone([9] * 4, 3)
    assert driven.scheduler.make_stats().num_preemptions == 1


def test_an_equal_arrival_waits() -> None:
    driven = full_of_low()
    driven.scheduler.add_request(ask("equal", [9] * 4, 3, priority=5))
    driven.scheduler.add_request(ask("less", [9] * 4, 3, priority=6))
    for _ in range(5):
        driven.step()
    assert running(driven) == ["low0", "low1"]


def test_a_request_is_displaced_once_in_64_steps() -> None:
    driven = full_of_low(max_num_seqs=1)
    times = set()
    for step in range(0, 300):
        if step % 5 == 0:
            driven.scheduler.add_request(ask(f"urgent{step}", [9] * 4, 1))
        driven.step()
        times.add(driven.scheduler.requests["low0"].rank.displaced_step)
    ordered = sorted(time for time in times if time is not None)
    assert len(ordered) >= 4
    assert all(late - early >= STEPS_BETWEEN_DISPLACEMENTS for early, late in pairwise(ordered))


def test_displacement_makes_room_in_memory_too_and_is_never_in_vain() -> None:
    driven = Driven(num_blocks=16, max_num_seqs=8)
    driven.scheduler.add_request(ask("low", [1] * 20, 40, priority=5))
    driven.step()
    driven.scheduler.add_request(ask("same", [2] * 20, 40))
    driven.step()
    # 10 of 16 blocks are taken; all of low's would not do for this one.
    driven.scheduler.add_request(ask("huge", [3] * 56, 2))
    driven.step()
    assert running(driven) == ["low", "same"]
    driven.scheduler.finish_requests(["huge"], FinishReason.ABORT)
    driven.scheduler.add_request(ask("large", [3] * 30, 2))
    driven.step()
    assert running(driven) == ["same", "large"]
    driven.run()
    assert driven.tokens("low") == alone([1] * 20, 40) and driven.tokens("same") == alone([2] * 20, 40)


def test_when_blocks_run_out_the_least_urgent_loses_them_though_it_is_the_oldest() -> None:
    driven = Driven(num_blocks=8, max_num_seqs=4, max_model_len=32)
    for name, priority in (("lowest", 9), ("low", 3), ("high", -1)):
        driven.scheduler.add_request(ask(name, [len(name)] * 8, 12, priority=priority))
        driven.step()
    while driven.scheduler.make_stats().num_preemptions == 0:
        driven.step()
    assert running(driven) == ["low", "high"]
    driven.run()
    assert all(driven.tokens(n) == alone([len(n)] * 8, 12) for n in ("lowest", "low", "high"))


def test_a_displaced_request_goes_back_by_its_own_priority_ahead_of_its_equals() -> None:
    driven = full_of_low()
    for name, priority in (("equal", 5), ("more", 4), ("less", 6)):
        driven.scheduler.add_request(ask(name, [7] * 4, priority=priority))
    # "more" displaces low1 at once, the urgent one then low0.
    driven.scheduler.add_request(ask("urgent", [9] * 4))
    driven.step()
    assert running(driven) == ["urgent", "more"]
    assert [r.request_id for r in driven.scheduler.waiting] == ["low0", "low1", "equal", "less"]


def test_who_came_resumed_goes_ahead_of_its_equals_only() -> None:
    driven = full_of_low()
    driven.scheduler.add_request(ask("new", [7], priority=5))
    driven.scheduler.add_request(ask("resumed", [7], priority=5, attempt=1))
    driven.scheduler.add_request(ask("resumed low", [7], priority=6, attempt=1))
    assert [r.request_id for r in driven.scheduler.waiting] == ["resumed", "new", "resumed low"]


def test_a_stream_of_urgent_requests_does_not_starve_a_low_one_and_age_does_not_displace() -> None:
    """Every slot is always wanted by urgent ones; the low one gets its turn, keeps it, and displaces nobody."""
    driven = Driven(max_num_seqs=2, num_blocks=200)
    count = 0

    def keep_full() -> None:
        nonlocal count
        while len(driven.scheduler.waiting) < 6:
            driven.scheduler.add_request(ask(f"urgent{count}", [count + 1] * 4, 5))
            count += 1

    keep_full()
    driven.step()
    driven.scheduler.add_request(ask("low", [500] * 4, 40, priority=9))
    steps = 0
    while not driven.tokens("low"):
        keep_full()
        driven.step()
        steps += 1
    assert AGE_STEPS <= steps <= AGE_STEPS + 5 * (MAX_OVERTAKES + 1)
    for _ in range(40):
        keep_full()
        driven.step()
    assert driven.tokens("low") == alone([500] * 4, 40)
    assert driven.scheduler.make_stats().num_preemptions == 0


def test_a_single_urgent_request_now_and_then_ages_nobody() -> None:
    """Low ones that wait long behind their equals stay behind an urgent one."""
    driven = full_of_low()
    for n in range(4):
        driven.scheduler.add_request(ask(f"more{n}", [20 + n] * 4, 4, priority=5))
    for _ in range(2 * AGE_STEPS):
        driven.step()
    driven.scheduler.add_request(ask("urgent", [9] * 4))
    driven.step()
    assert running(driven) == ["low0", "urgent"]


def test_an_urgent_request_does_not_wait_for_a_prefix_that_a_low_one_computes() -> None:
    driven = Driven(max_num_batched_tokens=16, long_prefill_token_threshold=2)
    prompt = list(range(100, 140))
    driven.scheduler.add_request(ask("low", [*prompt, 1], priority=5))
    driven.step()
    driven.scheduler.add_request(ask("urgent", [*prompt, 2]))
    driven.scheduler.add_request(ask("urgent too", [*prompt, 3]))
    driven.step()
    # The second waits for the first, which is as urgent.
    assert running(driven) == ["low", "urgent"]
    driven.run()
    assert driven.tokens("urgent too") == alone([*prompt, 3], 4)


def test_without_priorities_the_field_means_nothing() -> None:
    driven = full_of_low(use_priorities=False)
    driven.scheduler.add_request(ask("urgent", [9] * 4, 3))
    driven.step()
    assert running(driven) == ["low0", "low1"]


def test_an_urgent_request_without_chunks_displaces_only_where_its_prompt_then_fits_the_step() -> None:
    driven = Driven(max_num_seqs=2, enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    driven.scheduler.add_request(ask("equal", [1] * 4, 40))
    driven.scheduler.add_request(ask("low", [2] * 4, 40, priority=5))
    driven.step()
    driven.scheduler.add_request(ask("whole step", [3] * 60, 4))
    driven.step()
    assert running(driven) == ["equal", "whole step"]


def test_an_urgent_request_does_not_wait_for_the_long_prompts_of_low_ones() -> None:
    driven = Driven(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=400, max_model_len=512)
    for n in range(4):
        driven.scheduler.add_request(ask(f"low{n}", [n + 1] * 300, 4, priority=5))
    for _ in range(3):
        driven.step()
    driven.scheduler.add_request(ask("urgent", [9] * 8, 3))
    plan = driven.step()
    assert plan.num_scheduled_tokens["urgent"] == 8 and len(driven.tokens("urgent")) == 1
    driven.run()
    assert all(driven.tokens(f"low{n}") == alone([n + 1] * 300, 4) for n in range(4))


def test_a_long_urgent_prompt_leaves_one_token_to_each_of_the_others() -> None:
    driven = Driven(max_num_seqs=3, max_num_batched_tokens=16, num_blocks=400, max_model_len=512)
    driven.scheduler.add_request(ask("decodes", [1] * 4, 50, priority=5))
    driven.step()
    driven.scheduler.add_request(ask("reads", [2] * 300, 4, priority=5))
    driven.step()
    driven.scheduler.add_request(ask("urgent", [3] * 300, 4))
    driven.step()
    assert driven.step().num_scheduled_tokens == {"urgent": 14, "decodes": 1, "reads": 1}
    assert driven.step().num_scheduled_tokens == {"urgent": 14, "decodes": 1, "reads": 1}


def test_a_budget_below_the_number_of_requests_goes_round_whatever_their_urgency() -> None:
    driven = Driven(max_num_seqs=4)
    for n in range(4):
        driven.scheduler.add_request(ask(f"r{n}", [n + 1], 100, priority=n))
    driven.step()
    driven.scheduler.limits = dataclasses.replace(driven.limits, max_num_batched_tokens=2)
    for _ in range(40):
        driven.step()
    counts = [len(driven.tokens(f"r{n}")) for n in range(4)]
    assert max(counts) - min(counts) <= 1


def test_low_requests_sit_out_one_step_in_four_at_most_and_none_in_vain() -> None:
    driven = Driven(max_num_seqs=4, num_blocks=400)
    driven.scheduler.add_request(ask("low", [1] * 4, 100, priority=5))
    driven.step()
    served = []
    for n in range(40):
        if len(driven.scheduler.running) < 4:
            driven.scheduler.add_request(ask(f"urgent{n}", [n + 10] * 4, 2))
        plan = driven.step()
        served.append("low" in plan.num_scheduled_tokens)
        assert served[-1] or plan.new_requests
    missed = [step for step, one in enumerate(served) if not one]
    assert missed and all(late - early >= STEPS_BETWEEN_PAUSES for early, late in pairwise(missed))
