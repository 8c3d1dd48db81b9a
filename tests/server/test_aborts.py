"""Five hundred requests that are left in every phase: nothing of them stays, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from tests.server.harness import Server, Survivors

NUM_REQUESTS = 500
AT_ONCE = 25


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    # Few slots and a small pool: requests are left while they wait, run, and are preempted.
    return ["--max-num-seqs", "8", "--num-kv-blocks-override", "96", "--max-model-len", "1024"]


async def leave_early(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One request, dropped after a random time: before admission, in its prompt, between tokens, or near its end."""
    body = {
        "model": "demo",
        "prompt": [rng.randrange(10, 40000) for _ in range(rng.choice([4, 60, 300]))],
        "max_tokens": rng.choice([2, 100, 600]),
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 3]),
        "stream": rng.random() < 0.6,
        "logprobs": rng.choice([None, 2]),
    }
    try:
        async with asyncio.timeout(rng.choice([0.002, 0.02, 0.1, 0.4, 0.9])):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
    except (TimeoutError, httpx.TransportError):
        pass


async def storm(url: str) -> None:
    """All of them, some at a time."""
    rng = random.Random(5)
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def one() -> None:
            async with gate:
                await leave_early(client, rng)

        await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))


def test_nothing_stays_of_what_was_left(server: Server, survivors: Survivors) -> None:
    processes = len(server.family)
    with survivors.watch():
        asyncio.run(storm(server.url))
    until = time.monotonic() + 30
    while server.metric("num_requests_running") + server.metric("num_requests_waiting") and time.monotonic() < until:
        time.sleep(0.1)
    assert server.metric("num_requests_running") == 0
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("determinism_violations_total") == 0
    server.remember()
    assert len(server.family) == processes
    assert "Traceback" not in server.log.read_text()
