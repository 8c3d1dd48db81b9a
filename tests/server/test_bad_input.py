"""Every row of the bad-input table that these routes can receive: a 4xx with an OpenAI body, twice the same, and all
others unharmed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.harness import Server, Survivors

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def raw(**fields: Any) -> str:
    """A completion body as JSON text."""
    return json.dumps({"model": "demo", "prompt": "Hi", "max_tokens": 4, **fields})


def chat(**fields: Any) -> str:
    """A chat body as JSON text."""
    return json.dumps({"model": "demo", "messages": HELLO, "max_tokens": 4, **fields})


def bare(field: str, value: str) -> str:
    """A completion body with a bare word as a value, such as NaN."""
    return raw().removesuffix("}") + f', "{field}": {value}}}'


OUTSIDE = (49152, -1, 2**31, 2**63, 10**30)
CASES: dict[str, list[tuple[str, str | bytes, int]]] = {
    "token ids outside the vocabulary": [
        *[(TEXT, raw(prompt=[1, token]), 400) for token in OUTSIDE],
        *[(TEXT, raw(logit_bias={str(token): 1.0}), 400) for token in OUTSIDE],
        *[(TEXT, raw(stop_token_ids=[token]), 400) for token in OUTSIDE],
        *[(TEXT, raw(allowed_token_ids=[5, token]), 400) for token in OUTSIDE],
        (TEXT, raw(prompt=[1, True]), 400),
        (TEXT, raw(prompt=[1, 2.5]), 400),
        ("/detokenize", json.dumps({"tokens": [49152]}), 400),
    ],
    "numbers that are not finite": [
        (TEXT, bare(field, value), 400)
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for value in ("NaN", "Infinity", "-Infinity", "1e999")
    ],
    "logprobs beyond the limit": [
        (TEXT, raw(logprobs=21), 400),
        (TEXT, raw(logprobs=-1), 400),
        (CHAT, chat(logprobs=True, top_logprobs=21), 400),
        (CHAT, chat(logprobs=True, top_logprobs=-1), 400),
        (CHAT, chat(top_logprobs=2), 400),
        *[(TEXT, raw(prompt_logprobs=count), 400) for count in (-1, 21, 10**9)],
        *[(CHAT, chat(prompt_logprobs=count, stream=True), 400) for count in (-1, 21, 10**9)],
        (TEXT, raw(prompt=[1] * 200, echo=True, logprobs=21), 400),
    ],
    "n beyond the limit": [(TEXT, raw(n=10**6), 400), (CHAT, chat(n=10**6), 400), (TEXT, raw(n=0), 400)],
    "empty prompts": [
        *[(TEXT, raw(prompt=prompt), 400) for prompt in ("", [""], [], [[]], ["a", ""], None)],
        (CHAT, chat(messages=[]), 400),
    ],
    "seed outside int64": [(TEXT, raw(seed=seed), 400) for seed in (2**63, -(2**63) - 1, 10**400, "7", 1.5)],
    "lone surrogates": [
        *[(TEXT, raw(prompt="a\ud800b", stream=stream), 400) for stream in (False, True)],
        *[(TEXT, raw(stop=["\udfff"], stream=stream), 400) for stream in (False, True)],
        (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), 400),
        (CHAT, chat(messages=[{"role": "\ud800", "content": "a"}], stream=True), 400),
        ("/tokenize", json.dumps({"prompt": "\ud800"}), 400),
    ],
    "settings that contradict each other": [
        (TEXT, raw(min_tokens=5, max_tokens=4), 400),
        (TEXT, raw(top_p=0), 400),
        (TEXT, raw(top_p=1.1), 400),
        (TEXT, raw(temperature=-1), 400),
        (TEXT, raw(top_k=-2), 400),
        (TEXT, raw(max_tokens=0), 400),
        (TEXT, raw(stop=""), 400),
        (TEXT, raw(stop=["a", ""]), 400),
        (TEXT, raw(temperature="1"), 400),
        (TEXT, raw(prompt=[1] * 2000, echo=True, logprobs=20, n=128), 400),
        (TEXT, raw(prompt=[1] * 2000, echo=True, logprobs=20, n=128, stream=True), 400),
        *[(TEXT, raw(truncate_prompt_tokens=keep), 400) for keep in (0, -2, 8193, 10**30)],
        *[(TEXT, raw(request_id=name), 400) for name in ("", "a b", "\ud800", "x" * 1000)],
        *[(TEXT, raw(priority=value), 400) for value in (2**63, 1.5, "high")],
    ],
    "templates and their keywords": [
        (CHAT, chat(chat_template="{{ messages }}"), 400),
        ("/tokenize", json.dumps({"messages": HELLO, "chat_template": "{{ messages }}"}), 400),
        ("/tokenize", json.dumps({"messages": HELLO, "chat_template_kwargs": {"messages": 1}}), 400),
        *[
            (CHAT, chat(chat_template_kwargs={name: 1}), 400)
            for name in (
                "max_model_len",
                "messages",
                "tools",
                "chat_template",
                "tokenize",
                "bos_token",
                "a b",
                "\ud800",
            )
        ],
        (CHAT, chat(chat_template_kwargs=[1]), 400),
        (CHAT, chat(chat_template_kwargs={f"k{i}": 1 for i in range(100)}), 400),
        (CHAT, chat(documents=[{"title": "a"}]), 400),
        (CHAT, chat(documents="a"), 400),
        (CHAT, chat(continue_final_message=True, add_generation_prompt=True), 400),
        (CHAT, chat(messages=[{"role": "tool", "content": "x", "tool_call_id": 1}]), 400),
    ],
    "masks that leave nothing": [
        (TEXT, raw(allowed_token_ids=[]), 400),
        (TEXT, raw(allowed_token_ids=[504], bad_words=["The"]), 400),
        (TEXT, raw(allowed_token_ids=[504], bad_words=["The"], stream=True), 400),
        (CHAT, chat(allowed_token_ids=[504, 2], bad_words=["The"], min_tokens=2), 400),
        (TEXT, raw(allowed_token_ids=[504], stop_token_ids=[504], min_tokens=2), 400),
        *[(TEXT, raw(bad_words=[word]), 400) for word in ("", " ", "\t\n", "\u00a0", "\ud800")],
        (TEXT, raw(bad_words=["x"] * 10_000), 400),
        (CHAT, chat(bad_words=["x" * 10_000]), 400),
        (TEXT, raw(bad_words="x"), 400),
    ],
    "too long": [
        (TEXT, raw(prompt=[5] * 9000), 400),
        (TEXT, raw(prompt="word " * 20000), 400),
        (CHAT, chat(messages=[{"role": "user", "content": "word " * 20000}]), 400),
        (TEXT, raw(prompt="x" * 5_000_000), 400),
    ],
    "too much": [
        (TEXT, raw(stop=[f"s{i}" for i in range(10_000)]), 400),
        (TEXT, raw(prompt=["a"] * 1000), 400),
        (TEXT, raw(prompt=["a"] * 128, n=128), 400),
        (TEXT, raw(prompt=[1] * 1_000_000), 400),
        (TEXT, raw(prompt=[1] * 200_000 + [1.5]), 400),
        (TEXT, raw(prompt=[[]] * 1_000_000), 400),
        (TEXT, b" " * (16 * 1024 * 1024 + 1), 413),
    ],
    "not JSON, or not ours": [
        (TEXT, b"", 400),
        (TEXT, b"{", 400),
        (TEXT, b"[]", 400),
        (TEXT, b"null", 400),
        (TEXT, b'{"prompt": "a", "prompt": "b"}', 400),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "X"}]}]).replace('"X"', "[" * 400 + "]" * 400),
            400,
        ),
        (TEXT, b"\xff\xfe{}", 400),
        (TEXT, b"[" * 100_000, 400),
        (TEXT, b'{"prompt": ' + b"[" * 100_000, 400),
        (CHAT, chat(messages="hi"), 400),
        (CHAT, chat(messages=[1]), 400),
        (CHAT, chat(messages=[{"content": "x"}]), 400),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]),
            400,
        ),
        (TEXT, json.dumps({"model": "demo"}), 400),
    ],
    "features that do not exist": [
        (CHAT, chat(echo=True), 400),
        (TEXT, raw(suffix="x"), 400),
        (TEXT, raw(best_of=3), 400),
    ],
    "a model that is not served": [(TEXT, raw(model="gpt-4"), 404), (CHAT, chat(model="demo2"), 404)],
    "routes and methods": [("/v1/nothing", "{}", 404)],
}


def send(server: Server, path: str, body: str | bytes) -> httpx.Response:
    """The body as it is."""
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    return server.client.post(path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("name", CASES)
def test_row(server: Server, survivors: Survivors, name: str) -> None:
    with survivors.watch():
        for path, body, status in CASES[name]:
            answers = [send(server, path, body) for _ in range(2)]
            shown = str(body)[:120]
            assert [answer.status_code for answer in answers] == [status, status], f"{shown}: {answers[0].text[:300]}"
            error = answers[0].json()["error"]
            assert error == answers[1].json()["error"], shown
            assert set(error) == {"message", "type", "param", "code"} and error["message"], shown
            assert answers[0].headers["content-type"].startswith("application/json"), shown
            assert server.client.get("/health").status_code == 200


def test_the_field_is_named(server: Server) -> None:
    for field, value in {
        "seed": 2**70,
        "top_p": 2,
        "stop_token_ids": [10**6],
        "logit_bias": {"x": 1},
        "n": 10**6,
    }.items():
        assert send(server, TEXT, raw(**{field: value})).json()["error"]["param"] == field


def test_numbers_are_told(server: Server) -> None:
    message = send(server, TEXT, raw(prompt=[5] * 9000)).json()["error"]["message"]
    assert "9000" in message and "8192" in message


def test_wrong_method(server: Server) -> None:
    response = server.client.get(TEXT)
    assert response.status_code == 405 and response.json()["error"]["message"]


def test_extreme_settings_have_their_mathematical_meaning(server: Server, survivors: Survivors) -> None:
    base = {"model": "demo", "prompt": "The sky is", "max_tokens": 12, "seed": 3}
    greedy = server.text({**base, "temperature": 0})
    assert server.text({**base, "temperature": 1e-12}) == greedy
    assert server.text({**base, "temperature": 1.0, "top_p": 1e-4}) == greedy
    assert server.text({**base, "top_k": 10**7}) == server.text(base)
    with survivors.watch():
        assert server.text({**base, "temperature": 1e-12}) == greedy


def test_a_chunked_body_over_the_limit_is_cut_off(server: Server, survivors: Survivors) -> None:
    def endless() -> Any:
        for _ in range(20):
            yield b" " * (1024 * 1024)

    with survivors.watch():
        response = server.client.post(TEXT, content=endless())
        assert response.status_code == 413
        server.client.close()
        server.client = httpx.Client(base_url=server.url, timeout=120)


def test_one_request_id_twice_at_once(server: Server, survivors: Survivors) -> None:
    body = {"model": "demo", "prompt": "Numbers: one, two,", "max_tokens": 24, "temperature": 0, "request_id": "same"}
    with survivors.watch(), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post(TEXT, body).json(), range(4)))
        assert [answer["id"] for answer in answers] == ["cmpl-same"] * 4
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1


def test_an_id_is_free_again_as_soon_as_its_client_has_left(server: Server, survivors: Survivors) -> None:
    body = {
        "model": "demo",
        "prompt": "Numbers: one, two,",
        "max_tokens": 200,
        "ignore_eos": True,
        "request_id": "mine",
    }
    with survivors.watch():
        whole = server.text(body | {"seed": 4, "max_tokens": 24})
        for _ in range(4):
            with httpx.stream("POST", f"{server.url}{TEXT}", json=body | {"stream": True}, timeout=60) as left:
                next(left.iter_lines())
            assert server.text(body | {"seed": 4, "max_tokens": 24}) == whole


def test_health_is_answered_while_large_bodies_are_read(server: Server) -> None:
    """How long an answer takes is measured by hand (docs/benchmarks.md); here every one of them must come."""
    answers: list[int] = []
    done = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.is_set():
                answers.append(client.get("/health").status_code)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for prompt in ("x" * 15_000_000, "hello wor, " * 55_000, [1] * 5_000_000, [[]] * 3_000_000):
            assert send(server, TEXT, raw(prompt=prompt)).status_code == 400
    finally:
        done.set()
        poller.join()
    assert len(answers) > 10 and set(answers) == {200}
