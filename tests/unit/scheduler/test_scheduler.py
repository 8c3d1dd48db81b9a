"""The scheduler step by step: admission, sharing, fairness, aborts, figures."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.output import FinishReason
from evensong.protocol.step import ModelOutput
from evensong.scheduler import scheduler as scheduler_module
from evensong.scheduler.plan import Plan
from tests.unit.scheduler.driving import Driven, alone, ask

HYBRID: dict[str, Any] = {"windows": (None, 8), "max_num_batched_tokens": 8, "num_blocks": 20}
SLIDING: dict[str, Any] = {"windows": (8,), "max_num_batched_tokens": 8, "num_blocks": 5}


@pytest.mark.parametrize(
    ("request_fields", "limits", "status", "param", "said"),
    [
        ({"prompt": []}, {}, 400, "prompt", "no token"),
        ({"prompt": [1] * 128}, {}, 400, "prompt", "128 tokens.*max_model_len 128"),
        ({"prompt": [1] * 50, "max_tokens": 20}, {"num_blocks": 16}, 400, "max_tokens", "50 tokens.*69 tokens.*64"),
        ({"prompt": [1] * 70, "max_tokens": 20}, {"num_blocks": 16}, 400, "prompt", "70 tokens.*89 tokens.*64"),
        ({"prompt": [1] * 10, "max_tokens": None}, {"num_blocks": 16}, 400, "max_tokens", "127 tokens.*64"),
        ({"prompt": [1], "output_token_ids": [5, 5], "max_tokens": 2}, {}, 400, "max_tokens", "nothing left"),
        ({"prompt": [1] * 65}, {"enable_chunked_prefill": False}, 400, "prompt", "68 tokens.*64"),
        # A step and its window take 5 of the blocks at most; the other group has room for 15.
        ({"prompt": [1] * 50, "max_tokens": 12}, HYBRID, 400, "max_tokens", "50 tokens.*61 tokens.*holds 60"),
        ({"prompt": [1] * 50, "max_tokens": 12}, SLIDING | {"num_blocks": 4}, 400, "prompt", "61 tokens.*holds 16"),
    ],
)
def test_what_can_never_run_is_refused_with_the_figures(
    request_fields: dict[str, Any], limits: dict[str, Any], status: int, param: str, said: str
) -> None:
    driven = Driven(**limits)
    with pytest.raises(RequestError, match=said) as caught:
        driven.scheduler.add_request(ask("r", **request_fields))
    assert (caught.value.status, caught.value.param) == (status, param)
    assert not driven.scheduler.has_requests() and len(driven.scheduler.waiting) == 0


def test_what_just_fits_runs_to_its_end() -> None:
    driven = Driven(num_blocks=16)
    driven.scheduler.add_request(ask("r", [1] * 50, 15))
    driven.run()
    assert driven.tokens("r") == alone([1] * 50, 15)


def test_a_request_of_windows_alone_may_be_longer_than_the_pool() -> None:
    driven = Driven(**SLIDING)
    driven.scheduler.add_request(ask("r", list(range(100)), 20))
    most = 0
    while driven.scheduler.has_requests():
        driven.step()
        most = max(most, driven.scheduler.kv_cache.pool.num_owned)
    assert driven.tokens("r") == alone(list(range(100)), 20) and most <= 5


def test_a_hybrid_runs_what_just_fits() -> None:
    driven = Driven(**HYBRID)
    driven.scheduler.add_request(ask("r", [1] * 50, 11))
    driven.run()
    assert driven.tokens("r") == alone([1] * 50, 11)


def test_an_id_that_lives_is_a_conflict_and_one_that_ended_is_not() -> None:
    driven = Driven()
    driven.scheduler.add_request(ask("r", [1], 1))
    with pytest.raises(RequestError) as caught:
        driven.scheduler.add_request(ask("r", [2]))
    assert caught.value.status == 409
    driven.run()
    driven.scheduler.add_request(ask("r", [1], 1))
    driven.run()
    assert driven.tokens("r") == alone([1], 1) * 2


def test_a_full_queue_refuses_new_requests_and_takes_resumed_ones() -> None:
    # One slot is free, so one request beyond it may wait.
    driven = Driven(max_num_queued_reqs=1, max_num_seqs=1)
    driven.scheduler.add_request(ask("a", [1]))
    driven.scheduler.add_request(ask("b", [1]))
    with pytest.raises(RequestError) as caught:
        driven.scheduler.add_request(ask("c", [1]))
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "queue_full", 1)
    assert list(driven.scheduler.requests) == ["a", "b"]
    driven.scheduler.add_request(ask("d", [1], attempt=1))
    assert [r.request_id for r in driven.scheduler.waiting] == ["d", "a", "b"]


def test_an_admission_that_throws_leaves_nothing() -> None:
    driven = Driven()
    with pytest.raises(OverflowError):
        driven.scheduler.add_request(ask("r", [2**40] * 8))
    assert not driven.scheduler.has_requests() and len(driven.scheduler.waiting) == 0


def test_the_time_in_the_queue_ends_with_the_first_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told with the first tokens and never again; a preemption does not change it."""
    clock = iter(float(second) for second in range(100, 200))
    monkeypatch.setattr("evensong.scheduler.request.time.time", lambda: next(clock))
    driven = Driven(max_num_seqs=1)
    for name in ("first", "second"):
        driven.scheduler.add_request(ask(name, [1, 2, 3], 3))
    driven.step()
    driven.scheduler._preempt(driven.scheduler.requests["first"], Plan(driven.limits))
    driven.run()
    told = {name: [o.scheduled_time for o in driven.outputs if o.request_id == name] for name in ("first", "second")}
    assert told == {"first": [100.0, 0.0, 0.0], "second": [101.0, 0.0, 0.0]}


def test_32_requests_compute_a_shared_prefix_once() -> None:
    shared = list(range(100, 180))
    driven = Driven(num_blocks=200, max_num_seqs=32, max_num_batched_tokens=16)
    for n in range(32):
        driven.scheduler.add_request(ask(f"r{n}", [*shared, 200 + n], 1))
    driven.run()
    assert driven.executor.num_computed_tokens == 80 + 32
    assert all(driven.tokens(f"r{n}") == alone([*shared, 200 + n], 1) for n in range(32))
    assert [driven.last(f"r{n}").num_cached_tokens for n in range(32)] == [0] + [80] * 31


@pytest.mark.parametrize("way", ["abort", "preempt"])
def test_who_waits_for_a_writer_goes_on_when_the_writer_goes(way: str) -> None:
    driven = Driven(max_num_batched_tokens=8)
    prompt = list(range(100, 140))
    driven.scheduler.add_request(ask("writer", prompt))
    driven.scheduler.add_request(ask("waiter", [*prompt, 1]))
    driven.step()
    assert [r.request_id for r in driven.scheduler.waiting] == ["waiter"]
    if way == "abort":
        driven.scheduler.finish_requests(["writer"], FinishReason.ABORT)
    else:
        plan = Plan(driven.limits)
        driven.scheduler._preempt(driven.scheduler.requests["writer"], plan)
    driven.run(100)
    assert driven.tokens("waiter") == alone([*prompt, 1], 4)


def test_waiting_for_a_writer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_STEPS_BEHIND_A_WRITER", 3)
    driven = Driven(long_prefill_token_threshold=1)
    prompt = list(range(100, 140))
    driven.scheduler.add_request(ask("writer", prompt))
    driven.scheduler.add_request(ask("waiter", [*prompt, 1]))
    running = []
    for _ in range(5):
        driven.step()
        running.append(len(driven.scheduler.running))
    assert running == [1, 1, 1, 2, 2]


def test_no_running_request_starves_on_a_budget_below_their_number() -> None:
    driven = Driven()
    for n in range(7):
        driven.scheduler.add_request(ask(f"r{n}", [n + 1], 100))
    driven.step()
    driven.scheduler.limits = dataclasses.replace(driven.limits, max_num_batched_tokens=2)
    for _ in range(70):
        driven.step()
    counts = [len(driven.tokens(f"r{n}")) for n in range(7)]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 15


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    driven = Driven(max_num_batched_tokens=8)
    driven.scheduler.add_request(ask("short", [1], 20))
    driven.step()
    driven.scheduler.add_request(ask("long", [2] * 100, 2))
    for _ in range(10):
        assert driven.step().num_scheduled_tokens == {"short": 1, "long": 7}


def test_a_pool_for_one_serves_many_in_turn_without_livelock() -> None:
    driven = Driven(num_blocks=8, max_model_len=32)
    for n in range(8):
        driven.scheduler.add_request(ask(f"r{n}", [n + 1] * 4, 28))
    steps = driven.run()
    assert all(driven.tokens(f"r{n}") == alone([n + 1] * 4, 28) for n in range(8))
    assert driven.scheduler.make_stats().num_preemptions > 0
    assert steps <= 8 * 29, "slower than one after the other"


def test_500_aborts_in_every_phase_leave_no_block() -> None:
    rng = random.Random(0)
    driven = Driven(num_blocks=24, max_num_batched_tokens=12, max_model_len=64)
    aborted = 0
    while aborted < 500:
        if len(driven.scheduler.requests) < 12:
            length = rng.randint(1, 40)
            request_id = f"r{aborted}-{rng.random()}"
            driven.scheduler.add_request(ask(request_id, [rng.randint(0, 1)] * length, rng.randint(1, 20)))
        victim = rng.choice(list(driven.scheduler.requests))
        phase = rng.randrange(3)
        if phase == 0:
            driven.scheduler.finish_requests([victim, victim, "unknown"], FinishReason.ABORT)
            aborted += 1
            continue
        plan = driven.scheduler.schedule()
        driven.executor._execute(plan)
        output = driven.executor._sample()
        if phase == 1:
            last = driven.scheduler.finish_requests([victim], FinishReason.ABORT)
            assert [o.finish_reason for o in last[0]] == [FinishReason.ABORT]
            aborted += 1
        driven.scheduler.update_from_output(plan, output)
    driven.scheduler.finish_requests(list(driven.scheduler.requests), FinishReason.ABORT)
    assert driven.scheduler.check_kv_cache() | {"cached": 0} == {
        "total": 24, "free": 24, "owned": 0, "cached": 0, "tables": 0
    }  # fmt: skip
    stats = driven.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_a_row_that_cannot_be_sampled_ends_alone() -> None:
    driven = Driven()
    driven.scheduler.add_request(ask("bad", [1], client_index=1))
    driven.scheduler.add_request(ask("good", [2]))
    plan = driven.scheduler.schedule()
    output = ModelOutput(["bad", "good"], [[], [7]], [None, None], {"bad": "no finite logit"})
    outputs = driven.scheduler.update_from_output(plan, output)
    assert outputs[1][0].finish_reason is FinishReason.ERROR and outputs[1][0].error is not None
    assert outputs[1][0].error.status == 500 and "no finite logit" in outputs[1][0].error.message
    assert outputs[0][0].new_token_ids == [7] and list(driven.scheduler.requests) == ["good"]


def test_eos_and_stop_ids_end_a_request_through_the_scheduler() -> None:
    driven = Driven(next_token=lambda tokens: len(tokens))
    driven.scheduler.add_request(ask("eos", [9, 9], 50, eos_token_ids=[5]))
    driven.scheduler.add_request(ask("stop", [9, 9], 50, stop_token_ids=[6]))
    driven.scheduler.add_request(ask("late", [9, 9], 50, stop_token_ids=[3, 7], min_tokens=4))
    driven.scheduler.add_request(ask("full", [9] * 120, None))
    driven.run()
    expected = [[2, 3, 4, 5], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]]
    assert [driven.tokens(name) for name in ("eos", "stop", "late")] == expected
    assert (driven.last("stop").stop_reason, driven.last("eos").stop_reason) == (6, None)
    assert len(driven.tokens("full")) == 8 and driven.last("full").finish_reason is FinishReason.LENGTH


def test_a_resumed_request_continues_its_indices_and_tokens() -> None:
    driven = Driven()
    whole = alone([1, 2, 3], 8)
    driven.scheduler.add_request(ask("r", [1, 2, 3], 8, output_token_ids=whole[:3], attempt=2))
    driven.run()
    assert driven.tokens("r") == whole[3:]
    assert [(o.start, o.attempt) for o in driven.outputs] == [(n, 2) for n in range(3, 8)]


def test_figures_are_absolute_or_since_the_last_report() -> None:
    driven = Driven(max_num_seqs=1)
    prompt = list(range(100, 109))
    driven.scheduler.add_request(ask("a", prompt, 2))
    driven.scheduler.add_request(ask("b", prompt, 2))
    driven.step()
    first = driven.scheduler.make_stats()
    assert (first.num_running, first.num_waiting, first.kv_cache_usage) == (1, 1, 3 / 64)
    assert (first.prefix_cache_queries, first.prefix_cache_hits) == (9, 0)
    driven.run()
    second = driven.scheduler.make_stats()
    assert (second.num_running, second.prefix_cache_queries, second.prefix_cache_hits) == (0, 9, 8)
    assert driven.scheduler.make_stats().prefix_cache_queries == 0


def test_a_result_for_a_slot_that_was_lost_meanwhile_is_ignored() -> None:
    driven = Driven()
    driven.scheduler.add_request(ask("r", [1]))
    old = driven.scheduler.schedule()
    driven.scheduler.finish_requests(["r"], FinishReason.ABORT)
    driven.scheduler.add_request(ask("r", [2]))
    driven.scheduler.schedule()
    assert driven.scheduler.update_from_output(old, ModelOutput(["r"], [[7]], [None])) == {}
