"""The official client, streaming and not: chats, completions, n, stop, seed, logprobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.server.harness import Server, Survivors

HELLO = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_chat_whole_and_streamed_are_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=48)
    # What it says depends on the numeric mode of the machine.
    assert len(whole.choices[0].message.content or "") > 20
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_tokens=48, stream=True, stream_options={"include_usage": True}
    )
    text, usage, roles, reasons = "", None, [], []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles.append(choice.delta.role)
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert roles[0] == "assistant" and reasons[-1] == whole.choices[0].finish_reason
    assert usage and usage.completion_tokens == whole.usage.completion_tokens


def test_the_reported_seed_reproduces_each_choice(client: OpenAI) -> None:
    drawn = client.chat.completions.create(model="demo", messages=HELLO, temperature=1.2, max_tokens=24, n=3)
    assert len({choice.message.content for choice in drawn.choices}) > 1
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]
    for choice in drawn.choices:
        seed = choice.model_extra["seed"] if choice.model_extra else None
        again = client.chat.completions.create(model="demo", messages=HELLO, temperature=1.2, max_tokens=24, seed=seed)
        assert again.choices[0].message.content == choice.message.content
        assert again.model_extra and again.model_extra["seed"] == seed


def test_streamed_choices_join_to_the_whole(client: OpenAI) -> None:
    settings = {"model": "demo", "prompt": ["Red, green,", "One, two,"], "max_tokens": 16, "n": 2, "seed": 5}
    whole = client.completions.create(**settings)
    texts: dict[int, str] = {}
    seeds = []
    for chunk in client.completions.create(**settings, stream=True):
        seeds.append((chunk.model_extra or {}).get("seed"))
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [texts[i] for i in range(4)] == [choice.text for choice in whole.choices]
    assert seeds[0] == 5 and set(seeds[1:]) == {None}


def test_stop_strings_never_leak(client: OpenAI) -> None:
    settings = {"model": "demo", "prompt": "Count: 1, 2, 3, 4, 5, 6, 7,", "temperature": 0, "max_tokens": 40}
    full = client.completions.create(**settings).choices[0].text
    stop = full[7:12]
    cut = client.completions.create(**settings, stop=[stop, "never said"])
    assert cut.choices[0].text == full[: full.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage and cut.usage.completion_tokens < 40
    streamed = [
        c.choices[0].text for c in client.completions.create(**settings, stop=[stop, "never said"], stream=True)
    ]
    assert "".join(streamed) == cut.choices[0].text
    kept = client.completions.create(**settings, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == full[: full.index(stop) + len(stop)]


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content and len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the sampled token is the best one
        assert bytes(entry.bytes or []).decode() == entry.token
    completion = client.completions.create(model="demo", prompt="Hi", max_tokens=3, logprobs=2, temperature=0)
    logprobs = completion.choices[0].logprobs
    assert logprobs and logprobs.tokens and len(logprobs.tokens) == 3
    assert logprobs.top_logprobs and all(len(top) == 2 for top in logprobs.top_logprobs)


def test_token_prompts_and_token_ids(client: OpenAI, server: Server) -> None:
    tokens = server.post("/tokenize", {"prompt": "The sea is"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "The sea is"
    settings = {"model": "demo", "max_tokens": 8, "temperature": 0}
    by_text = client.completions.create(prompt="The sea is", extra_body={"return_token_ids": True}, **settings)
    by_ids = client.completions.create(prompt=tokens, **settings)
    assert by_text.choices[0].text == by_ids.choices[0].text
    extra = by_text.choices[0].model_extra or {}
    assert extra["prompt_token_ids"] == tokens and len(extra["token_ids"]) == 8
    assert server.post("/detokenize", {"tokens": extra["token_ids"]}).json()["prompt"] == by_text.choices[0].text


def test_lengths(client: OpenAI) -> None:
    settings = {"model": "demo", "prompt": "Hello", "temperature": 0}
    exact = client.completions.create(**settings, max_tokens=30, extra_body={"ignore_eos": True})
    assert exact.usage and exact.usage.completion_tokens == 30 and exact.choices[0].finish_reason == "length"
    first = client.completions.create(**settings, max_tokens=1, extra_body={"return_token_ids": True})
    stop_id = (first.choices[0].model_extra or {})["token_ids"][0]
    stopped = client.completions.create(**settings, max_tokens=30, extra_body={"stop_token_ids": [stop_id]})
    assert stopped.usage and stopped.usage.completion_tokens == 1 and stopped.choices[0].text == ""
    longer = client.completions.create(
        **settings, max_tokens=30, extra_body={"stop_token_ids": [stop_id], "min_tokens": 5}
    )
    assert longer.usage and longer.usage.completion_tokens >= 5


def test_cached_tokens_are_reported_and_change_nothing(client: OpenAI) -> None:
    settings = {"model": "demo", "prompt": "A long shared beginning. " * 12, "max_tokens": 12, "seed": 1}
    answers = [client.completions.create(**settings) for _ in range(2)]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers if a.usage and a.usage.prompt_tokens_details]
    assert cached[0] == 0 and cached[1] and cached[1] % 16 == 0


def test_bad_requests_raise_in_the_client(client: OpenAI, survivors: Survivors) -> None:
    with survivors.watch(), pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=0, stream=True, n=10**6)
    assert caught.value.param == "n"
