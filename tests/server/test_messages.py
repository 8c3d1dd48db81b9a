"""/v1/messages through Anthropic's client: whole, streamed, tools, stop sequences, prefill, bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from openai import OpenAI

from tests.server.harness import Server, Survivors

KEY = "secret"
QUESTION = "What is the capital of France?"
HELLO: Any = [{"role": "user", "content": QUESTION}]
SAMPLED: dict[str, Any] = {"model": "demo", "extra_body": {"seed": 3, "temperature": 0.9}}
GREEDY: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of the next days.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_same_text_over_every_api(client: Anthropic, server: Server) -> None:
    fields = {"model": "demo", "seed": 3, "temperature": 0.9}
    answer = server.post("/v1/chat/completions", {**fields, "messages": HELLO, "max_tokens": 48})
    chat = answer.json()["choices"][0]["message"]["content"]
    whole = client.messages.create(messages=HELLO, max_tokens=48, **SAMPLED)
    assert whole.content[0].model_dump()["text"] == chat and len(chat) > 20
    assert whole.model_extra and whole.model_extra["seed"] == 3
    with client.messages.stream(messages=HELLO, max_tokens=48, **SAMPLED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == chat and final.content[0].model_dump()["text"] == chat
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
        response = other.responses.create(
            model="demo", input=QUESTION, max_output_tokens=48, temperature=0.9, extra_body={"seed": 3}
        )
    assert response.output_text == chat


def test_events_come_in_the_api_s_order(client: Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(messages=HELLO, max_tokens=8, stream=True, **SAMPLED)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_system_and_blocks(client: Anthropic) -> None:
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    texts = [
        client.messages.create(system=system, messages=messages, max_tokens=24, **GREEDY).content[0].model_dump()
        for system, messages in (("Be brief.", HELLO), ([{"type": "text", "text": "Be brief."}], blocks))
    ]
    assert texts[0]["text"] == texts[1]["text"]
    counted = client.messages.count_tokens(model="demo", messages=blocks, system="Be brief.")
    usage = client.messages.create(system="Be brief.", messages=HELLO, max_tokens=1, **GREEDY).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stop_sequences(client: Anthropic) -> None:
    fields: Any = {"messages": HELLO, "max_tokens": 48, **SAMPLED}
    full = client.messages.create(**fields).content[0].model_dump()["text"]
    stop = full[10:14]
    cut = client.messages.create(**fields, stop_sequences=["never said", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].model_dump()["text"] == full[: full.index(stop)]
    with client.messages.stream(**fields, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert final.content[0].model_dump()["text"] == full[: full.index(stop)]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_a_cut_message_and_a_prefill(client: Anthropic) -> None:
    extra = {"temperature": 0, "ignore_eos": True}
    whole = client.messages.create(model="demo", messages=HELLO, max_tokens=24, extra_body=extra)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    text = whole.content[0].model_dump()["text"]
    prefill: Any = [*HELLO, {"role": "assistant", "content": text[: text.index(" ", 20)]}]
    rest = client.messages.create(messages=prefill, max_tokens=12, **GREEDY).content[0].model_dump()["text"]
    assert rest and not rest.startswith(text[:20])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools(client: Anthropic, choice: Any) -> None:
    question: Any = [{"role": "user", "content": "Weather in Paris?"}]
    fields: Any = {
        "tools": [WEATHER],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 400,
        **SAMPLED,
    }
    whole = client.messages.create(messages=question, **fields)
    (use,) = whole.content
    assert use.type == "tool_use" and use.name == "get_weather" and whole.stop_reason == "tool_use"
    assert set(use.input) == {"city", "days"}
    with client.messages.stream(messages=question, **fields) as stream:
        assert stream.get_final_message().content == whole.content
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns: Any = [*question, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    following = client.messages.create(messages=turns, tools=[WEATHER], max_tokens=16, **SAMPLED)
    assert following.usage.output_tokens > 0


def test_structured_text(client: Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(messages=HELLO, output_config=config, max_tokens=400, **SAMPLED)
    assert set(json.loads(message.content[0].model_dump()["text"])) == {"name", "age"}


def test_thinking_is_a_permission(client: Anthropic) -> None:
    """A server that knows of no reasoning has no thinking blocks, and answers all the same."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(messages=HELLO, thinking=thinking, max_tokens=1100, **GREEDY)
    assert [block.type for block in message.content] == ["text"]


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
BAD: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "no text": {"messages": [{"role": "user", "content": None}]},
    "no length": {"max_tokens": None},
    "a length of nothing": {"max_tokens": 0},
    "a lone surrogate": {"messages": [{"role": "user", "content": "a\ud800b"}]},
    "a lone surrogate in the system": {"system": "\ud800"},
    "a lone surrogate in a stop sequence": {"stop_sequences": ["\ud800"]},
    "a lone surrogate in a tool": {"tools": [{**WEATHER, "name": "\ud800"}]},
    "too many messages": {"messages": [{"role": "user", "content": "a"}] * 5000},
    "too many stop sequences": {"stop_sequences": ["a"] * 10_000},
    "an empty stop sequence": {"stop_sequences": [""]},
    "a block of no kind": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "a block that is no object": {"messages": [{"role": "user", "content": [[]]}]},
    "a tool_use without result": {"messages": [*HELLO, {"role": "assistant", "content": [USE]}, *HELLO]},
    "a tool_result without use": {"messages": [{"role": "user", "content": [RESULT]}]},
    "a role of no kind": {"messages": [{"role": "narrator", "content": "a"}]},
    "a server tool": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "a tool without schema": {"tools": [{"name": "f"}]},
    "a tool with a wrong schema": {
        "tools": [{"name": "f", "input_schema": {"type": "objekt"}}],
        "tool_choice": {"type": "any"},
    },
    "a choice of no tool": {"tool_choice": {"type": "any"}},
    "a choice of another tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
    "a seed outside int64": {"seed": 2**63},
    "a wrong temperature": {"temperature": -1},
    "thinking without a budget": {"thinking": {"type": "enabled"}},
    "a prompt that is too long": {"messages": [{"role": "user", "content": "word " * 20_000}]},
    "a container": {"container": "c"},
    "other servers": {"mcp_servers": [{"type": "url", "url": "http://127.0.0.1/"}]},
}


@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(server: Server, survivors: Survivors, stream: bool) -> None:
    """400 with Anthropic's body before any byte of a stream, the same twice; a neighbour streams on."""
    with survivors.watch():
        for name, fields in BAD.items():
            body = json.dumps({"model": "demo", "messages": HELLO, "max_tokens": 4, "stream": stream, **fields})
            answers = [server.client.post("/v1/messages", content=body) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [400, 400], (name, answers[0].text)
            bodies = [answer.json() for answer in answers]
            assert bodies[0]["error"] == bodies[1]["error"], name
            assert bodies[0]["type"] == "error" and bodies[0]["error"]["type"] == "invalid_request_error", name
    server.wait_idle()


def test_other_refusals(server: Server, client: Anthropic, survivors: Survivors) -> None:
    with survivors.watch():
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for content in (b"{", b"[]", b'{"model": NaN}', b"\xff"):
                answer = server.client.post(path, content=content)
                assert answer.status_code == 400 and answer.json()["type"] == "error"
        with pytest.raises(NotFoundError):
            client.messages.create(model="other", messages=HELLO, max_tokens=4)
        with pytest.raises(NotFoundError):
            client.messages.count_tokens(model="other", messages=HELLO)
        with pytest.raises(BadRequestError) as caught:
            client.messages.create(messages=HELLO, max_tokens=0, stream=True, **GREEDY)
        assert "max_tokens" in str(caught.value)


def test_keys(demo_model: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Server(tmp_path_factory.mktemp("keys") / "log.txt", "--api-key", KEY) as server:
        for options in ({"api_key": KEY}, {"auth_token": KEY}):
            with Anthropic(base_url=server.url, max_retries=0, **options) as client:  # type: ignore[arg-type]  # one dict
                assert client.messages.create(messages=HELLO, max_tokens=4, **GREEDY).usage.output_tokens == 4
        with (
            Anthropic(base_url=server.url, max_retries=0, api_key="other") as client,
            pytest.raises(AuthenticationError),
        ):
            client.messages.create(messages=HELLO, max_tokens=4, **GREEDY)
