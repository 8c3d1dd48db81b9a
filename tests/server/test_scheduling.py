"""Priority and time limits through the real server: who overtakes whom, what a late request gets, equal bytes."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.server.harness import KNOWN, Neighbour, Server, Survivors, events

LOW = {"model": "demo", "max_tokens": 64, "temperature": 0.8, "ignore_eos": True, "stream": True, "priority": 10}
URGENT = {**KNOWN, "priority": 0}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--max-num-seqs", "2", "--max-num-queued-reqs", "8"]


def low(seed: int) -> dict[str, Any]:
    return {**LOW, "prompt": f"Chapter {seed} of the long report says", "seed": seed}


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
