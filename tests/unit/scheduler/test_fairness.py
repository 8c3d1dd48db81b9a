"""Fair shares: who goes next, what is charged, and that no tenant's flood, priority or idle time costs another."""

from __future__ import annotations

import random

import pytest

from evensong.protocol.output import FinishReason
from evensong.scheduler.fairness import MAX_IDLE_TENANTS, OUTPUT_COST, FairQueue, FairShare
from evensong.scheduler.request import Request
from tests.unit.scheduler.driving import Driven, alone, ask


def fair(weights: dict[str, float] | None = None, **limits: int) -> Driven:
    settings = {"max_num_seqs": 2, "num_blocks": 400, "max_model_len": 256} | limits
    return Driven(policy=FairShare(weights or {}), **settings)  # type: ignore[arg-type]  # numbers, all of them


def tokens_of(driven: Driven, tenant: str) -> int:
    return sum(len(o.new_token_ids) for o in driven.outputs if o.request_id.startswith(tenant))


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    driven = fair()
    for n in range(40):
        driven.scheduler.add_request(ask(f"a{n}", [n + 1] * 8, 8, tenant="a"))
    for _ in range(5):
        driven.step()
    driven.scheduler.add_request(ask("b0", [99] * 8, 8, tenant="b"))
    while "b0" not in [r.request_id for r in driven.scheduler.running]:
        driven.step()
    # The next slot was for it, though 36 or more came before it.
    assert sum(o.finish_reason is not None for o in driven.outputs) <= 4
    driven.run()
    assert driven.tokens("b0") == alone([99] * 8, 8) and driven.tokens("a39") == alone([40] * 8, 8)


@pytest.mark.parametrize("weights", [{}, {"a": 3.0}])
def test_shares_follow_the_weights_whatever_the_sizes(weights: dict[str, float]) -> None:
    """While both have work, served tokens by weight differ by no more than the paper's bound allows."""
    driven = fair(weights)
    rng = random.Random(3)
    for n in range(60):
        driven.scheduler.add_request(ask(f"a{n}", [n + 1] * rng.randint(1, 8), rng.randint(1, 8), tenant="a"))
        driven.scheduler.add_request(ask(f"b{n}", [n + 1] * rng.randint(8, 30), rng.randint(8, 30), tenant="b"))
    queue = driven.scheduler.waiting
    assert isinstance(queue, FairQueue)
    # 2 max(w_p L_input, w_q M) of the paper, with a batch of two requests of at most 60 tokens.
    bound = 2 * OUTPUT_COST * 2 * 60
    while queue.waiting_of("a") and queue.waiting_of("b"):
        driven.step()
        assert abs(queue.counter("a") - queue.counter("b")) <= bound
    assert tokens_of(driven, "a") > 0 and tokens_of(driven, "b") > 0


def test_idle_time_is_not_saved_up() -> None:
    driven = fair(max_num_seqs=1)
    for n in range(20):
        driven.scheduler.add_request(ask(f"a{n}", [n + 1] * 8, 8, tenant="a"))
    for _ in range(80):
        driven.step()
    for n in range(20):
        driven.scheduler.add_request(ask(f"b{n}", [n + 100] * 8, 8, tenant="b"))
    begun = len({o.request_id for o in driven.outputs})
    for _ in range(80):
        driven.step()
    order = list(dict.fromkeys(o.request_id[0] for o in driven.outputs if o.start == 0))
    started = [o.request_id[0] for o in driven.outputs if o.start == 0][begun:]
    assert order == ["a", "b"] and abs(started.count("a") - started.count("b")) <= 1


def test_priorities_hold_within_a_tenant_only() -> None:
    driven = fair(max_num_seqs=1)
    driven.scheduler.add_request(ask("a-low", [1] * 4, 30, tenant="a", priority=5))
    driven.step()
    driven.scheduler.add_request(ask("b-urgent", [2] * 4, 4, tenant="b", priority=-9))
    for _ in range(3):
        driven.step()
    assert [r.request_id for r in driven.scheduler.running] == ["a-low"]
    driven.scheduler.add_request(ask("a-urgent", [3] * 4, 4, tenant="a", priority=-9))
    driven.step()
    assert driven.scheduler.requests["a-low"].rank.displaced_step is not None
    assert [r.request_id for r in driven.scheduler.running] == ["a-urgent"]
    driven.run()
    assert driven.tokens("a-low") == alone([1] * 4, 30)


def test_when_blocks_run_out_the_tenant_that_had_most_gives_way() -> None:
    driven = fair(max_num_seqs=3, num_blocks=8, max_model_len=32)
    driven.scheduler.add_request(ask("a", [1] * 4, 20, tenant="a"))
    for _ in range(6):
        driven.step()
    driven.scheduler.add_request(ask("b", [2] * 4, 20, tenant="b", priority=7))
    while not driven.scheduler.make_stats().num_preemptions:
        driven.step()
    assert [r.request_id for r in driven.scheduler.running] == ["b"]
    driven.run()
    assert driven.tokens("a") == alone([1] * 4, 20) and driven.tokens("b") == alone([2] * 4, 20)


def test_input_is_charged_once_and_each_output_token() -> None:
    driven = fair(weights={"a": 2.0})
    queue = driven.scheduler.waiting
    assert isinstance(queue, FairQueue)
    driven.scheduler.add_request(ask("a", [1] * 10, 5, tenant="a"))
    driven.run()
    assert queue.counter("a") == (10 + 5 * OUTPUT_COST) / 2


def test_aborts_leave_no_queue_behind() -> None:
    driven = fair(max_num_seqs=1)
    for n in range(6):
        driven.scheduler.add_request(ask(f"r{n}", [n + 1] * 4, 8, tenant=f"t{n % 3}"))
    driven.step()
    driven.scheduler.finish_requests([f"r{n}" for n in range(6)], FinishReason.ABORT)
    assert len(driven.scheduler.waiting) == 0 and list(driven.scheduler.waiting) == []
    assert list(driven.scheduler.waiting.candidates(1)) == []


def test_a_million_users_take_no_more_memory_than_those_who_owe() -> None:
    queue = FairQueue({})
    for n in range(3 * MAX_IDLE_TENANTS):
        request = Request(ask(f"r{n}", [1], tenant=f"t{n}"))
        queue.append(request)
        queue.start(request)
    assert len(queue._counters) <= MAX_IDLE_TENANTS + 2
