"""Headers, keys, metrics, disconnects, queue limits: how the server behaves around its answers."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.harness import Neighbour, Server, Survivors, events


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    logs = ["--log-format", "json", "--access-log"]
    return ["--max-num-seqs", "4", "--max-num-queued-reqs", "4", "--served-model-name", "demo", *logs]


def test_request_ids_go_in_and_out(server: Server) -> None:
    given = server.client.get("/v1/models", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = [server.client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    unsafe = server.client.get("/health", headers={"X-Request-Id": "a b<c>"})
    assert unsafe.headers["x-request-id"] != "a b<c>"


def test_unknown_fields_are_named_and_advisory_ones_accepted(server: Server) -> None:
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 1, "user": "u", "metadata": {}, "frobnicate": 1}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200
    assert "frobnicate" in response.headers["x-evensong-warning"]
    assert "user" not in response.headers["x-evensong-warning"]


def test_version_and_models(server: Server) -> None:
    version = server.client.get("/version").json()
    assert version["deterministic"] is True and version["fingerprint"]
    assert version["kernels"]["kernel_build"].startswith("evensong ")
    answer = server.post("/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 1}).json()
    assert answer["system_fingerprint"] == version["fingerprint"]


def test_a_client_that_leaves_is_aborted(server: Server, survivors: Survivors) -> None:
    body = {"model": "demo", "prompt": "Tell", "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(events(response))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, timeout=1.0)
    until = time.monotonic() + 20
    while server.metric("num_requests_running") and time.monotonic() < until:
        time.sleep(0.1)
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0
    with survivors.watch():
        pass


def test_the_queue_has_an_end(server: Server, survivors: Survivors) -> None:
    body = {"model": "demo", "prompt": "Go on", "max_tokens": 48, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda _: httpx.post(f"{server.url}/v1/completions", json=body, timeout=120), range(16))
        )
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= 8
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "rate_limit_error"
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1


def test_metrics_count(server: Server) -> None:
    before = {name: server.metric(name) for name in ("generation_tokens_total", "prompt_tokens_total")}
    finished = server.metric("request_success_total")
    server.text({"model": "demo", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
    assert server.metric("generation_tokens_total") == before["generation_tokens_total"] + 5
    assert server.metric("prompt_tokens_total") == before["prompt_tokens_total"] + 3
    assert server.metric("request_success_total") == finished + 1
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("determinism_violations_total") == 0
    assert server.client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_a_slow_reader_loses_nothing(server: Server) -> None:
    body = {"model": "demo", "prompt": "Slowly", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    whole = server.text(body)
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        text = ""
        for event in events(response):
            text += event["choices"][0]["text"]
            time.sleep(0.03)
    assert text == whole


def test_neighbours_do_not_change_each_other(server: Server, survivors: Survivors) -> None:
    neighbours = [Neighbour(server) for _ in range(3)]
    assert {neighbour.finish() for neighbour in neighbours} == {survivors.neighbour}


def test_logs_are_one_object_a_line_in_every_process(server: Server) -> None:
    server.client.get("/v1/models", headers={"X-Request-Id": "look-for-me"})
    until = time.monotonic() + 5
    while "look-for-me" not in server.log.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    # What is printed to be pasted comes on stdout, which this log holds too.
    lines = [line for line in server.log.read_text().splitlines() if not line.startswith(("evensong serves", "  "))]
    records = [json.loads(line) for line in lines]
    assert {record["process"] for record in records} == {"launcher", "http-0", "core-0"}
    assert all({"time", "level", "logger", "message"} <= set(record) for record in records)
    (own,) = [record["message"] for record in records if "look-for-me" in record["message"]]
    assert own.startswith("127.0.0.1 GET /v1/models 200 ")
