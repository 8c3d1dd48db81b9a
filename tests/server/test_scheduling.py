"""Priority and time limits through the real server: who overtakes whom, what a late request gets, equal bytes."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from tests.server.harness import KNOWN, Neighbour, Server, Survivors, events

LOW = {"model": "demo", "max_tokens": 64, "temperature": 0.8, "ignore_eos": True, "stream": True, "priority": 10}
URGENT = {**KNOWN, "priority": 0}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return [
        "--max-num-seqs",
        "2",
        "--max-num-queued-reqs",
        "8",
        "--max-num-queued-tokens",
        "600",
        "--fair-share",
        "user",
    ]


def low(seed: int) -> dict[str, Any]:
    return {**LOW, "prompt": f"Chapter {seed} of the long report says", "seed": seed}


class Flooding(threading.Thread):
    """A completion in a thread of its own."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = server.url, body
        self.status = self.retry_after = 0
        self.start()

    def run(self) -> None:
        answer = httpx.post(f"{self._url}/v1/completions", json=self._body, timeout=120)
        self.status, self.retry_after = answer.status_code, int(answer.headers.get("retry-after", "0"))


def test_an_urgent_request_overtakes_low_ones_and_every_byte_stays(server: Server) -> None:
    alone = [Neighbour(server, low(seed)).finish() for seed in range(4)]
    known = server.text(KNOWN)
    preempted = server.metric("num_preemptions_total")
    # Two hold the slots, two more wait with the same priority.
    running = [Neighbour(server, low(seed)) for seed in range(2)]
    waiting: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=seed: waiting.update({n: Neighbour(server, low(n)).finish()}))
        for seed in range(2, 4)
    ]
    for thread in threads:
        thread.start()
    assert server.text(URGENT) == known
    assert all(neighbour.running for neighbour in running), "it waited for a slot"
    assert server.metric("num_preemptions_total") > preempted
    for thread in threads:
        thread.join(120)
    assert [neighbour.finish() for neighbour in running] == alone[:2]
    assert [waiting[seed] for seed in range(2, 4)] == alone[2:]
    assert server.metric("kv_cache_usage_perc") == 0


def test_one_user_s_flood_does_not_hold_up_another(server: Server) -> None:
    flood = [
        Flooding(server, {**KNOWN, "max_tokens": 48, "ignore_eos": True, "user": "a", "seed": n}) for n in range(6)
    ]
    until = time.monotonic() + 60
    while server.metric("num_requests_waiting") < 4 and time.monotonic() < until:
        time.sleep(0.02)
    server.text({**KNOWN, "user": "b"})
    assert any(one.is_alive() for one in flood), "it waited for all of them"
    for one in flood:
        one.join(120)
        assert one.status == 200


def test_the_queue_has_an_end_in_tokens(server: Server, survivors: Survivors) -> None:
    body = {"model": "demo", "prompt": [11] * 400, "max_tokens": 48, "ignore_eos": True}
    with survivors.watch():
        flood = [Flooding(server, body) for _ in range(6)]
        for one in flood:
            one.join(120)
    codes = [one.status for one in flood]
    assert set(codes) == {200, 429} and codes.count(200) >= 3
    assert all(1 <= one.retry_after <= 120 for one in flood if one.status == 429)


def test_a_request_over_its_time_is_an_error_and_leaves_nothing(server: Server, survivors: Survivors) -> None:
    body = {"model": "demo", "prompt": "Go on", "max_tokens": 2000, "ignore_eos": True, "timeout": 1.0}
    with survivors.watch():
        late = server.post("/v1/completions", body)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            *pieces, last = events(answer)
        assert last["error"]["code"] == "request_timeout" and last["error"]["type"] == "timeout_error"
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert len(pieces) < 2000 and all(piece["choices"][0]["finish_reason"] is None for piece in pieces)
    assert server.metric("kv_cache_usage_perc") == 0
    seed = {"seed": pieces[0]["seed"]} if pieces else {}
    whole = server.text({**body, **seed, "timeout": None, "max_tokens": max(len(pieces), 1)})
    assert not pieces or whole.startswith(text[:20])


@pytest.mark.parametrize("field", [{"priority": 2**63}, {"priority": "high"}, {"timeout": 0}, {"timeout": 1e300}])
def test_bad_values_are_refused_by_name(server: Server, survivors: Survivors, field: dict[str, Any]) -> None:
    name = next(iter(field))
    with survivors.watch():
        refused = server.post("/v1/completions", {**KNOWN, **field})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name
