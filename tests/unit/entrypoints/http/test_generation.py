"""Completions and chats: forms, streams that join to the whole, refusals before the status line, ends of all kinds."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.request import EngineCoreRequest
from tests.unit.entrypoints.http.serving import ANSWER, Served, TalkingClient, Visitor, run, settle, until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
NUM_TOKENS = len(ANSWER.encode()) + 1  # EOS counts


def test_a_completion() -> None:
    async def body(served: Served) -> None:
        answer = await served.complete(seed=7)
        assert answer["object"] == "text_completion" and answer["model"] == "demo"
        assert answer["seed"] == 7 and answer["system_fingerprint"] == "fake"
        assert answer["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": NUM_TOKENS,
            "total_tokens": 2 + NUM_TOKENS,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert answer["choices"] == [
            {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None, "seed": 7}
        ]
        assert (await served.complete(max_tokens=3))["choices"][0]["finish_reason"] == "length"

    run(body)


def test_a_chat() -> None:
    async def body(served: Served) -> None:
        answer = await served.chat(return_token_ids=True)
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert answer["object"] == "chat.completion" and isinstance(answer["seed"], int)
        assert len(choice["token_ids"]) == NUM_TOKENS
        assert choice["prompt_token_ids"] == answer["prompt_token_ids"] == served.core.script.added[0].prompt_token_ids
        limits = await served.chat(max_tokens=9, max_completion_tokens=4)
        assert limits["usage"]["completion_tokens"] == 4
        assert served.core.script.added[0].params.max_tokens > 1000, "without a limit the context is the limit"

    run(body)


def test_streams_join_to_the_whole() -> None:
    async def body(served: Served) -> None:
        form = {"prompt": ["hi", "ok"], "n": 2, "seed": 5, "max_tokens": 100, "logprobs": 2}
        whole = await served.complete(**form)
        events = await served.stream(TEXT, **form, stream_options={"include_usage": True})
        assert events[0]["seed"] == 5 and all("seed" not in event for event in events[1:])
        assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-1])
        joined: dict[int, dict[str, Any]] = {}
        for event in events[:-1]:
            for choice in event["choices"]:
                seen = joined.setdefault(choice["index"], {"text": "", "offsets": [], "tokens": []})
                seen["text"] += choice["text"]
                seen["offsets"] += choice["logprobs"]["text_offset"]
                seen["tokens"] += choice["logprobs"]["tokens"]
                seen["reason"], seen["seed"] = choice["finish_reason"], choice["seed"]
        assert sorted(joined) == [0, 1, 2, 3] == [choice["index"] for choice in whole["choices"]]
        for choice in whole["choices"]:
            seen = joined[choice["index"]]
            assert seen["text"] == choice["text"] == ANSWER
            assert seen["offsets"] == choice["logprobs"]["text_offset"]
            assert seen["tokens"] == choice["logprobs"]["tokens"]
            assert (seen["reason"], seen["seed"]) == (choice["finish_reason"], choice["seed"])
        seeds = [choice["seed"] for choice in whole["choices"]]
        assert seeds[0] == 5 and seeds[1] != 5 and seeds[2:] == seeds[:2]

    run(body)


def test_a_chat_stream_opens_with_its_first_token() -> None:
    async def body(served: Served) -> None:
        messages = [{"role": "user", "content": "hi"}]
        visitor = Visitor(served.app, "/v1/chat/completions", {"messages": messages, "stream": True})
        await until(lambda: visitor.statuses)  # a thread renders the prompt
        await settle()
        # Admitted, so the status line is there; an event now would pass for the first token.
        assert visitor.statuses == [200] and not any(message.get("body") for message in visitor.messages)
        visitor.leave()
        await visitor.task

    run(body, functools.partial(TalkingClient, hold_after=0))


def test_a_chat_stream() -> None:
    async def body(served: Served) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        form = {"messages": HELLO, "n": 2, "return_token_ids": True, "max_tokens": 100}
        events = await served.stream(CHAT, **form, stream_options=options)
        for index, event in enumerate(events[:2]):
            assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert event["choices"][0]["index"] == index
        assert events[0]["prompt_token_ids"] == served.core.script.added[0].prompt_token_ids
        used = [event["usage"]["completion_tokens"] for event in events]
        assert used == sorted(used) and used[0] == 0 and used[-1] == 2 * NUM_TOKENS
        texts, ids = {0: "", 1: ""}, {0: 0, 1: 0}
        for event in events[2:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"]["content"]
            ids[choice["index"]] += len(choice["token_ids"])
        assert texts == {0: ANSWER, 1: ANSWER} and ids == {0: NUM_TOKENS, 1: NUM_TOKENS}
        assert "usage" not in (await served.stream(CHAT, messages=HELLO))[0]

    run(body)


def test_stop_strings() -> None:
    async def body(served: Served) -> None:
        cut = (await served.complete(stop=["界!", "never"]))["choices"][0]
        assert cut["text"] == ANSWER.split("界!")[0]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "界!")
        events = await served.stream(TEXT, prompt="hi", max_tokens=100, stop="界!")
        assert "".join(event["choices"][0]["text"] for event in events) == cut["text"]
        kept = (await served.complete(stop="界!", include_stop_str_in_output=True))["choices"][0]
        assert kept["text"] == cut["text"] + "界!"

    run(body)


def test_logprobs() -> None:
    async def body(served: Served) -> None:
        content = (await served.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).startswith(ANSWER.encode())
        assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content)
        bare = (await served.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in bare)
        served.core.worst_logprob = float("-inf")
        for choice in ((await served.complete(logprobs=3)), (await served.chat(logprobs=True, top_logprobs=3))):
            assert "-9999.0" in str(choice) and "inf" not in str(choice)

    run(body)


def test_every_setting_reaches_the_core() -> None:
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "stop_token_ids": [20],
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }

    async def body(served: Served) -> None:
        await served.complete(**settings, logit_bias={"20": -100}, max_tokens=9)
        await served.chat(**settings, logit_bias={"20": -100}, max_tokens=9)
        for request in served.core.script.added:
            assert {name: getattr(request.params, name) for name in settings} == settings
            assert request.params.logit_bias == {20: -100.0} and request.params.max_tokens == 9
        nulls = dict.fromkeys([*settings, "logit_bias", "n", "stop", "stream", "stream_options", "model", "user"])
        await served.complete(**nulls, max_tokens=None)

    run(body)


BAD: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["a", ""]},
    {"prompt": [1, 10**30]},
    {"prompt": [20] * 5000},
    {"prompt": "\ud800"},
    {"prompt": ["a"] * 129},
    {"prompt": ["a"] * 128, "n": 128},
    {"stop": [f"s{i}" for i in range(10_000)]},
    {"stop": ""},
    {"n": 10**6},
    {"n": 0},
    {"seed": 2**63},
    {"logprobs": 21},
    {"logprobs": -1},
    {"logprobs": True},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"20": "1"}},
    {"logit_bias": {"9999999": 1}},
    {"stop_token_ids": [-1]},
    {"max_tokens": 0},
    {"max_tokens": 10**30},
    {"min_tokens": 5, "max_tokens": 4},
    {"temperature": -1},
    {"temperature": 10**400},
    {"top_p": 0},
    {"cache_salt": "\ud800"},
]


@pytest.mark.parametrize("form", BAD, ids=lambda form: "-".join(form))
def test_bad_settings_never_reach_the_core(form: dict[str, Any]) -> None:
    async def body(served: Served) -> None:
        for stream in (False, True):
            answers = [await served.post(TEXT, **{"prompt": "hi", "stream": stream, **form}) for _ in range(2)]
            assert answers[0].status_code == 400, answers[0].text[:500]
            error = answers[0].json()["error"]
            assert error["param"] in (*form, "prompt") and len(answers[0].text) < 1000
            assert answers[0].text == answers[1].text
        if len(form.get("prompt", "")) < 2:
            assert not served.core.script.added
        await settle()
        assert not served.state.engine.front.outputs.open_ids()  # type: ignore[union-attr]
        assert served.state.num_active == 0

    run(body)


def test_a_refusal_of_the_core_comes_before_the_status_line() -> None:
    def refuse(request: EngineCoreRequest) -> RequestError | None:
        if 99 in request.prompt_token_ids:
            return RequestError("the queue is full", status=429, type="rate_limit_error", retry_after=2)
        return None

    async def body(served: Served) -> None:
        for stream in (False, True):
            refused = await served.post(TEXT, prompt=[[20], [99], [21]], max_tokens=9, stream=stream)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "2"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert served.state.num_active == 0
        assert not served.state.engine.front.outputs.open_ids()  # type: ignore[union-attr]
        await served.complete()

    run(body, functools.partial(TalkingClient, refuse=refuse))


def test_death_of_the_engine() -> None:
    async def body(served: Served) -> None:
        stream = asyncio.create_task(served.stream(TEXT, prompt="hi", max_tokens=100))
        whole = asyncio.create_task(served.post(CHAT, messages=HELLO))
        await settle()
        served.core.script.die("killed by SIGKILL")
        events = await stream
        assert events[-1]["error"]["type"] == "engine_dead" and "SIGKILL" in events[-1]["error"]["message"]
        assert events[0]["choices"][0]["text"] == "G"
        answer = await whole
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "engine_dead"
        assert served.state.num_active == 0

    run(body, functools.partial(TalkingClient, hold_after=3))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [{"prompt": "hi"}, {"prompt": ["a", "b"], "n": 2}])
def test_a_client_that_leaves_ends_its_requests(
    stream: bool, form: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(served: Served) -> None:
        visitor = Visitor(served.app, TEXT, {**form, "max_tokens": 100, "stream": stream})
        await settle()
        assert served.state.num_active == 1
        assert visitor.statuses == ([200] if stream else [])
        added = {request.request_id for request in served.core.script.added}
        assert added and not served.core.script.aborted
        visitor.leave()
        await visitor.task
        assert set(served.core.script.aborted) == added
        assert served.state.num_active == 0 and await served.state.wait_quiet(1)

    run(body, functools.partial(TalkingClient, hold_after=3))
    assert not caplog.records


def test_a_drain_waits_for_what_runs() -> None:
    async def body(served: Served) -> None:
        visitor = Visitor(served.app, TEXT, {"prompt": "hi", "stream": True})
        await settle()
        served.state.draining = True
        assert not await served.state.wait_quiet(0.05)
        assert (await served.post(TEXT, prompt="hi")).status_code == 503
        await served.state.engine.abort_everything()  # type: ignore[union-attr]
        assert await served.state.wait_quiet(5)
        await visitor.task
        sent = b"".join(m.get("body", b"") for m in visitor.messages)
        assert b'"finish_reason":"abort"' in sent and sent.endswith(b"data: [DONE]\n\n")

    run(body, functools.partial(TalkingClient, hold_after=3))


def test_what_a_request_leaves_open_is_the_models_then_the_apis() -> None:
    async def body(served: Served) -> None:
        engine = served.state.engine
        assert engine is not None
        await served.complete(max_tokens=None)
        await served.post(TEXT, prompt="hi")
        defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 7}
        engine.front.sampling_defaults.update(defaults)
        await served.post(TEXT, prompt="hi")
        await served.chat(top_k=None)
        await served.chat(temperature=1.0, top_k=0, repetition_penalty=1, max_completion_tokens=3)
        await served.complete(max_tokens=None)
        params = [request.params for request in served.core.script.added]
        shown = [(p.temperature, p.top_k, p.repetition_penalty, p.max_tokens) for p in params]
        whole = 4096 - 2
        assert shown[:2] == [(1.0, 0, 1.0, whole), (1.0, 0, 1.0, 16)]
        assert shown[2:4] == [(0.6, 20, 1.1, 7)] * 2
        assert shown[4:] == [(1.0, 0, 1.0, 3), (0.6, 20, 1.1, whole)]

    run(body)
