"""Control routes: who may call them, what their arguments may be, and aborting by the ids that callers know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from evensong.protocol.control import VERBS
from evensong.utils.progress import CoreState
from tests.unit.entrypoints.http.serving import Served, TalkingClient, run, settle

ROUTED = [verb for verb in VERBS.values() if verb.route is not None]


def calls(served: Served) -> list[tuple[str, dict[str, Any]]]:
    return served.core.script.calls


def test_every_verb_with_a_route_is_reached_and_described() -> None:
    async def body(served: Served) -> None:
        document = (await served.http.get("/openapi.json")).json()
        for verb in ROUTED:
            assert verb.route is not None
            method = verb.route.method
            operation = document["paths"][f"/{verb.name}"][method.lower()]
            assert operation["description"] == verb.doc
            form = {"method": "describe"} if verb.route.body else None
            answer = await served.http.request(method, f"/{verb.name}", json=form)
            assert answer.status_code == 200, answer.text
            assert answer.json() == {verb.route.key: verb.route.done or f"{verb.name} done"}
            assert calls(served)[-1] == (verb.name, form or {})

    run(body)


def test_arguments_come_in_the_query() -> None:
    async def body(served: Served) -> None:
        assert (await served.http.post("/pause?mode=keep&clear_cache=false&timeout=2.5")).status_code == 200
        assert calls(served)[-1] == ("pause", {"mode": "keep", "clear_cache": False, "timeout": 2.5})
        await served.http.post("/sleep?level=2")
        assert calls(served)[-1] == ("sleep", {"level": 2})
        for query in ("tags=weights&tags=kv_cache", "tags=weights,kv_cache"):
            await served.http.post(f"/wake_up?{query}")
            assert calls(served)[-1] == ("wake_up", {"tags": ["weights", "kv_cache"]})
        await served.http.post("/start_profile?profile_prefix=12")
        assert calls(served)[-1] == ("start_profile", {"profile_prefix": "12"})

    run(body)


@pytest.mark.parametrize(
    ("path", "form", "field"),
    [
        ("/pause?mode=stop", None, "mode"),
        ("/pause?mode=keep&mode=wait", None, "mode"),
        ("/pause?timeout=-1", None, "timeout"),
        ("/pause?timeout=nan", None, "timeout"),
        ("/pause?timeout=1e999", None, "timeout"),
        ("/sleep?level=3", None, "level"),
        ("/sleep?level=", None, "level"),
        ("/sleep?lvl=1", None, "lvl"),
        ("/wake_up?tags=", None, "tags"),
        ("/collective_rpc", {"method": "shutdown"}, "method"),
        ("/collective_rpc", {"method": "describe", "timeout": "1"}, "timeout"),
        ("/collective_rpc", {}, "method"),
        ("/abort_requests", {"request_ids": "a"}, "request_ids"),
        ("/abort_requests", {"request_ids": ["a"] * 10_001}, "request_ids"),
        ("/abort_requests", {}, "request_ids"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_called(path: str, form: Any, field: str) -> None:
    async def body(served: Served) -> None:
        answers = [await served.http.post(path, json=form) for _ in range(2)]
        assert answers[0].status_code == 400, answers[0].text
        assert answers[0].json()["error"]["param"] == field and answers[0].text == answers[1].text
        assert calls(served) == []

    run(body)


@pytest.mark.parametrize(
    ("host", "headers", "allowed"),
    [
        ("127.0.0.1", {}, True),
        ("127.9.9.9", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("10.0.0.7", {}, False),
        ("10.0.0.7", {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}, False),
        ("::2", {}, False),
        ("localhost.evil", {}, False),
        ("127.0.0.1", {"Origin": "http://evil.example"}, False),
        ("127.0.0.1", {"Origin": "null"}, False),
        ("127.0.0.1", {"Origin": "http://mine"}, True),
    ],
)
def test_without_a_key_this_machine_alone_may_control(host: str, headers: dict[str, str], allowed: bool) -> None:
    async def body(served: Served) -> None:
        for path, form in (("/pause", None), ("/abort_requests", {"request_ids": []})):
            answer = await served.http.post(path, json=form, headers=headers)
            assert answer.status_code == (200 if allowed else 403), answer.text
        # What is no control route stays open.
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
        if not allowed:
            assert calls(served) == [] and answer.json()["error"]["type"] == "permission_error"

    run(body, client=(host, 1), allowed_origins=("http://mine",))


def test_with_a_key_anyone_who_has_it_may() -> None:
    async def body(served: Served) -> None:
        assert (await served.http.post("/pause")).status_code == 401
        headers = {"Authorization": "Bearer k", "Origin": "http://elsewhere"}
        assert (await served.http.post("/pause", headers=headers)).status_code == 200

    run(body, client=("10.0.0.7", 1), api_key=("k",))


def test_requests_end_by_the_ids_that_callers_know() -> None:
    async def body(served: Served) -> None:
        async def hang(name: str, prompt: Any, path: str = "/v1/completions") -> Any:
            form: dict[str, Any] = {"prompt": prompt} if "chat" not in path else {"messages": prompt}
            return await served.http.post(path, json={**form, "max_tokens": 50}, headers={"X-Request-Id": name})

        message = [{"role": "user", "content": "hi"}]
        tasks = {
            "one": asyncio.create_task(hang("one", "a")),
            "two": asyncio.create_task(hang("two", ["a", "b"])),
            "chat": asyncio.create_task(hang("chat", message, "/v1/chat/completions")),
            "left": asyncio.create_task(hang("left", "a")),
        }
        await settle()
        for given, count in ((["cmpl-one"], 1), (["two"], 2), (["chatcmpl-chat", "chat"], 1), (["no", "one"], 0)):
            answer = await served.http.post("/abort_requests", json={"request_ids": given})
            assert answer.json() == {"aborted": count}
            await settle()
        for name in ("one", "two", "chat"):
            answer = await asyncio.wait_for(tasks[name], 5)
            assert answer.status_code == 200
            assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"abort"}
        assert not tasks["left"].done()
        await served.http.post("/abort_requests", json={"request_ids": ["left"]})
        await asyncio.wait_for(tasks["left"], 5)

    run(body, lambda: TalkingClient(hold_after=0))


@pytest.mark.parametrize("state", [CoreState.PAUSED, CoreState.ASLEEP])
def test_health_says_that_work_waits(state: CoreState) -> None:
    async def body(served: Served) -> None:
        served.state.progress.set_state(state)
        health = await served.http.get("/health")
        assert health.status_code == 200 and "wait" in health.json()["held"]
        ready = await served.http.get("/health/ready")
        assert ready.status_code == 503 and "wait" in ready.json()["error"]["message"]
        assert (await served.http.get("/health/progress")).status_code == 200
        served.state.progress.set_state(CoreState.OPEN)
        assert (await served.http.get("/health/ready")).status_code == 200

    run(body)


def test_progress_is_missed_only_where_there_is_work() -> None:
    async def body(served: Served) -> None:
        async def look() -> int:
            return (await served.http.get("/health/progress")).status_code

        await asyncio.sleep(0.3)
        assert await look() == 200, "nothing to do is no fault"
        request = asyncio.create_task(served.post("/v1/completions", prompt="a"))
        await settle()
        assert (await served.http.get("/load")).json() == {"server_load": 1}
        assert await look() == 200, "the work has just come"
        await asyncio.sleep(0.3)
        refused = await served.http.get("/health/progress")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_progress"
        assert (await served.http.get("/health")).status_code == 200
        served.state.progress.tick()
        assert await look() == 200, "a layer of a long step"
        served.state.progress.step_begins(100)
        await asyncio.sleep(0.3)
        assert await look() == 200, "a layer of many tokens"
        served.state.progress.step_done()
        name = served.state.engine.front.outputs.request_ids()[0]  # type: ignore[union-attr]
        await served.http.post("/abort_requests", json={"request_ids": [name]})
        await request
        await asyncio.sleep(0.3)
        assert await look() == 200

    run(body, lambda: TalkingClient(hold_after=0), stall_timeout=0.2)
