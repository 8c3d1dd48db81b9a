"""Priority and time limits over HTTP: what reaches the engine, and how a request over its time is answered."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from starlette.requests import Request

from evensong.entrypoints.http.schemas import CompletionForm
from evensong.entrypoints.http.service import service_options
from evensong.protocol.output import FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.tenants import tenant_id
from evensong.testing.byte_tokenizer import byte_ids
from evensong.testing.fake_client import tokens
from tests.unit.entrypoints.http.serving import Served, TalkingClient, run

TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


class LateClient(TalkingClient):
    """Sends three tokens, then says that the time is over; with `together` all in one message."""

    def __init__(self, reason: str = "timeout", together: bool = False, text: str = "abc") -> None:
        super().__init__()
        self._text = text
        self._reason = reason
        self._together = together

    async def _talk(self, request: EngineCoreRequest) -> None:
        ids = byte_ids(self._text)
        if self._together:
            self.send(tokens(request, 0, ids, FinishReason.ABORT, stop_reason=self._reason))
            return
        for index, token_id in enumerate(ids):
            self.send(tokens(request, index, [token_id]))
        self.send(tokens(request, 3, [], FinishReason.ABORT, stop_reason=self._reason))


@pytest.mark.parametrize(
    ("reason", "code", "param", "retry"),
    [("timeout", "request_timeout", "timeout", None), ("queue_timeout", "queue_timeout", None, "1")],
)
def test_a_whole_answer_over_its_time_is_an_error(reason: str, code: str, param: str | None, retry: str | None) -> None:
    async def body(served: Served) -> None:
        for path, form in ((TEXT, {"prompt": ["hi", "ok"], "n": 2}), ("/v1/chat/completions", {"messages": HELLO})):
            answer = await served.post(path, **form, timeout=5)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"], error["param"]) == (
                408, "timeout_error", code, param
            )  # fmt: skip
            assert answer.headers.get("retry-after") == retry
        assert served.state.num_active == 0

    run(body, functools.partial(LateClient, reason))


@pytest.mark.parametrize("together", [False, True])
def test_a_stream_over_its_time_has_its_tokens_and_then_an_error_event(together: bool) -> None:
    async def body(served: Served) -> None:
        events = await served.stream(TEXT, prompt="hi", timeout=5)
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc"
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["error"]["code"] == "request_timeout"

    run(body, functools.partial(LateClient, together=together))


def test_a_stream_over_its_time_has_what_a_parser_held() -> None:
    """Three bytes that may yet begin a call."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def body(served: Served) -> None:
        events = await served.stream("/v1/chat/completions", messages=HELLO, tools=[tool], timeout=5)
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
        assert "".join(deltas) == "a<t" and deltas[-1] == "<t"
        assert events[-1]["error"]["code"] == "request_timeout"

    run(body, functools.partial(LateClient, text="a<t"))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_other_apis_have_it_too(path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {
            "model": "demo",
            "messages": HELLO,
            "max_tokens": 9,
            "tools": [{"name": "add", "input_schema": {}}],
        },
        "/v1/responses": {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": {}}]},
    }

    async def body(served: Served) -> None:
        answer = await served.post(path, **bodies[path], stream=True, timeout=5)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
        assert "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas) == "a<t"
        assert events[-1]["type"] in ("error", "response.failed")

    run(body, functools.partial(LateClient, text="a<t"))


def test_an_abort_that_is_no_timeout_stays_an_answer() -> None:
    async def body(served: Served) -> None:
        answer = await served.complete()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abc", "abort")

    run(body, functools.partial(LateClient, "another"))


def test_priority_and_timeout_reach_the_core() -> None:
    async def body(served: Served) -> None:
        await served.complete(priority=-3, timeout=2.5)
        await served.chat(priority=None)
        first, second = served.core.script.added
        assert (first.priority, first.timeout) == (-3, 2.5)
        assert (second.priority, second.timeout) == (0, 0.0)

    run(body)


@pytest.mark.parametrize(
    "form", [{"priority": 2**63}, {"priority": 0.5}, {"priority": "high"}, {"timeout": 0}, {"timeout": -1}]
)
def test_what_is_no_priority_or_time_is_a_400_that_names_it(form: dict[str, Any]) -> None:
    async def body(served: Served) -> None:
        answer = await served.post(TEXT, prompt="hi", **form)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(form))
        assert not served.core.script.added

    run(body)


def test_the_tenant_is_the_user_or_the_key_and_only_its_digest_travels() -> None:
    async def by_user(served: Served) -> None:
        await served.complete(user="alice")
        await served.complete()
        refused = await served.post(TEXT, prompt="hi", user=5)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "user"
        first, second = served.core.script.added
        assert first.tenant == tenant_id("alice") and "alice" not in first.tenant and second.tenant == ""

    async def by_key(served: Served) -> None:
        await served.complete(user="alice")
        assert served.core.script.added[0].tenant == ""

    run(by_user, engine={"fair_share": "user"})
    run(by_key, engine={"fair_share": "key"})


@pytest.mark.parametrize(("name", "tenant"), [("key-1", tenant_id("key-1")), (None, "")])
def test_the_key_s_name_is_the_middleware_s(name: str | None, tenant: str) -> None:
    request = Request({"type": "http", "state": {"api_key_name": name}})
    options = service_options(request, CompletionForm(prompt="hi"), "key")
    assert tenant_id(options["tenant"]) == tenant
