"""Events that are pushed: the same answer, an event a token, and what happens to slow, late and leaving clients."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from evensong.entrypoints.http import completions
from evensong.entrypoints.http.protocol import CycleWriter
from tests.unit.entrypoints.http.serving import (
    ANSWER,
    Served,
    TalkingClient,
    Visitor,
    Writer,
    pushing,
    run,
    settle,
    until,
)

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NUM_TOKENS = len(ANSWER.encode()) + 1  # EOS counts


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    lines = [line for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (TEXT, {"prompt": "hi", "max_tokens": 100}),
        (TEXT, {"prompt": "hi", "max_tokens": 100, "logprobs": 2, "return_token_ids": True, "echo": True}),
        (TEXT, {"prompt": "hi", "max_tokens": 100, "prompt_logprobs": 1}),
        (TEXT, {"prompt": "hi", "max_tokens": 100, "stop": "界", "stream_options": USAGE}),
        (CHAT, {"messages": HELLO, "stream_options": USAGE}),
        (CHAT, {"messages": HELLO, "tools": [TOOL], "logprobs": True, "return_token_ids": True}),
    ],
)
def test_a_stream_says_the_same_as_one_that_is_not_pushed(path: str, form: dict[str, Any]) -> None:
    bodies: list[bytes] = []

    async def body(served: Served) -> None:
        headers = {"X-Request-Id": "same"}
        answer = await served.http.post(path, json={"seed": 7, "stream": True, **form}, headers=headers)
        assert answer.status_code == 200, answer.text
        bodies.append(answer.content)

    for pushed in (True, False):
        run(body, pushed=pushed)
    pushed_events, events = (events_of(one) for one in bodies)
    for event in (*pushed_events, *events):
        del event["created"]
    if "prompt_logprobs" not in form:  # tokens that come before the status line are merged there
        assert len(pushed_events) >= len(events)
    assert joined(pushed_events) == joined(events)
    assert [list(event) for event in pushed_events[:1]] == [list(event) for event in events[:1]]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What all events say together."""
    said: dict[str, Any] = {"text": "", "content": "", "ids": [], "logprobs": [], "last": events[-1]}
    for event in events:
        for choice in event["choices"]:
            said["text"] += choice.get("text", "")
            said["content"] += choice.get("delta", {}).get("content") or ""
            said["ids"] += choice.get("token_ids", [])
            said["logprobs"].append(choice.get("logprobs") and list(choice["logprobs"].values()))
            said["reason"] = choice["finish_reason"]
    said["logprobs"] = [item for one in said["logprobs"] if one for values in one for item in values]
    said["last"] = {name: value for name, value in said["last"].items() if name != "choices"}
    return said


def test_every_token_has_an_event_of_its_own() -> None:
    async def body(served: Served) -> None:
        events = await served.stream(TEXT, prompt="hi", max_tokens=100, n=2, stream_options=USAGE)
        # The tokens that came before the status line was sent among them.
        assert [event["usage"]["completion_tokens"] for event in events[:-1]] == list(range(1, 2 * NUM_TOKENS + 1))

    run(body)


def test_a_slow_client_gets_the_rest_merged() -> None:
    writer = Writer()

    async def body(served: Served) -> None:
        writer.room = 3
        visitor = Visitor(pushing(served.app, lambda: writer), TEXT, {"prompt": "hi", "stream": True, "max_tokens": 99})
        await settle()
        assert len(writer.parts) == 3 and not visitor.task.done()
        writer.make_room(None)
        await until(visitor.task.done)
        events = events_of(b"".join(message.get("body", b"") for message in visitor.messages))
        assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
        assert 4 < len(events) < NUM_TOKENS, "three, the one that found no room, and what was merged meanwhile"
        assert served.state.num_active == 0

    # As many as are made before the status line are kept as they are: later ones are merged.
    run(body, functools.partial(TalkingClient, answer=ANSWER))


def test_a_client_that_leaves_while_it_is_pushed_to() -> None:
    async def body(served: Served) -> None:
        visitor = Visitor(pushing(served.app), TEXT, {"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 99})
        await settle()
        assert visitor.statuses == [200] and not served.core.script.aborted
        visitor.leave()
        await visitor.task
        added = {request.request_id for request in served.core.script.added}
        assert set(served.core.script.aborted) == added and len(added) == 4
        assert served.state.num_active == 0

    run(body, functools.partial(TalkingClient, hold_after=3))


def test_an_event_that_cannot_be_made_ends_its_stream_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(served: Served) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(completions._Chunks, "of", lambda *arguments: 1 / 0)
            events = await served.stream(TEXT, prompt="hi", max_tokens=9)
        assert events[-1]["error"]["message"] == "internal error: ZeroDivisionError"
        await settle()
        assert served.core.script.aborted, "the request must not run on"
        assert (await served.stream(TEXT, prompt="hi", max_tokens=9))[-1]["choices"]

    run(body)
    assert "failed in its stream" in caplog.text


class Cycle:
    """What CycleWriter uses of uvicorn's cycle."""

    def __init__(self) -> None:
        self.chunked_encoding, self.response_complete, self.disconnected = True, False, False
        self.flow = self.transport = self
        self.write_paused = False
        self.written = b""

    def write(self, data: bytes) -> None:
        """As a transport."""
        self.written += data


def test_chunks_are_framed_and_wait_for_nobody() -> None:
    cycle = Cycle()
    writer = CycleWriter(cycle)  # type: ignore[arg-type]
    assert writer.write(b"data: twelve chars")
    assert cycle.written == b"12\r\ndata: twelve chars\r\n"
    cycle.write_paused = True
    assert not writer.write(b"more") and cycle.written.endswith(b"chars\r\n")
    cycle.disconnected = True
    assert writer.write(b"more") and cycle.written.endswith(b"chars\r\n"), "nobody reads it"
    cycle.response_complete = True
    with pytest.raises(AssertionError):
        writer.write(b"late")
