"""Log-probabilities on the real model: one entry a returned token in every mode, whole as streamed, alone as in crowds.

Compared with ==, never with a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import SamplingParams
from tests.server.harness import Neighbour, Server, Survivors, events

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Twelve little sheep went out to sea, and in the evening they"
SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
# Tokens that are parts of characters, drawn at random: bytes that are no text come out too.
PIECES = {"temperature": 9.0, "seed": 3, "ignore_eos": True, "text_of": "👋é世界🍁ü"}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SAMPLED,
    "several": SAMPLED | {"n": 3},
    "a stop string": {"temperature": 0, "stop": [" a", "zzz"]},
    "a stop string that stays": {"temperature": 0, "stop": [" a"], "include_stop_str_in_output": True},
    "a stop id": {"temperature": 0, "logit_bias": {"504": 100}, "stop_token_ids": [504]},
    "eos": {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 4},
    "eos that is shown": {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 4, "skip_special_tokens": False},
    "parts of characters": PIECES,
    "several of parts": PIECES | {"n": 2},
    "by id": SAMPLED | {"logprob_token_ids": [504, 260, 28]},
    "one token": {"temperature": 0, "max_tokens": 1},
}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--max-model-len", "512"]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), multiprocess=False, max_model_len=512, disable_log_stats=True) as made:
        yield made


def body_of(server: Server, path: str, name: str, count: int) -> dict[str, Any]:
    body = {"model": "demo", "max_tokens": 48, "return_token_ids": True, "seed": 1, **CASES[name]}
    if text := body.pop("text_of", None):
        body["allowed_token_ids"] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    if path == CHAT:
        return body | {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": count}
    return body | {"prompt": PROMPT, "logprobs": count}


def whole(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices, as text, token ids, logprobs and ending."""
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert "Infinity" not in answer.text and "NaN" not in answer.text
    form = answer.json()
    assert form["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in form["choices"])
    assert [choice["index"] for choice in form["choices"]] == list(range(body.get("n", 1)))
    return [
        {
            "text": choice["text"] if path == TEXT else choice["message"]["content"],
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"],
            "ending": (choice["finish_reason"], choice["stop_reason"], choice["seed"]),
        }
        for choice in form["choices"]
    ]


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, joined from a stream; each chunk has as many entries as tokens."""
    joined: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "logprobs": {}, "ending": None} for _ in range(body.get("n", 1))
    ]
    with server.client.stream("POST", path, json=body | {"stream": True}) as response:
        for event in events(response):
            for choice in event["choices"]:
                own = joined[choice["index"]]
                own["text"] += choice["text"] if path == TEXT else choice["delta"].get("content") or ""
                own["token_ids"] += choice.get("token_ids") or []
                for key, part in (choice["logprobs"] or {}).items():
                    own["logprobs"].setdefault(key, []).extend(part)
                    assert body.get("echo") or len(part) == len(choice.get("token_ids", ()))
                if choice["finish_reason"]:
                    own["ending"] = (choice["finish_reason"], choice["stop_reason"], choice["seed"])
    return joined


def check(path: str, name: str, choice: dict[str, Any], count: int) -> None:
    """One entry a token, exactly `count` best, and bytes and offsets that are those of the text."""
    ids, text, logprobs = choice["token_ids"], choice["text"], choice["logprobs"]
    asked = len(CASES[name].get("logprob_token_ids", ()))
    if path == TEXT:
        assert [len(part) for part in logprobs.values()] == [len(ids)] * 4
        assert all(-9999.0 <= value <= 0 for value in logprobs["token_logprobs"])
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets) and (offsets[0] == 0 or not ids)
        for token, start, top in zip(logprobs["tokens"], offsets, logprobs["top_logprobs"], strict=True):
            assert token.startswith(("bytes:", "<|")) or text[start:].startswith(token[: len(text) - start])
            assert top is None if not count + asked else count <= len(top) <= count + 1 + asked and token in top
        return
    assert len(logprobs["content"]) == len(ids)
    assert all(count <= len(entry["top_logprobs"]) <= count + asked for entry in logprobs["content"])
    joined = bytes(byte for entry in logprobs["content"] for byte in entry["bytes"]).decode("utf-8", "replace")
    assert joined == text or (CASES[name].get("stop") and joined.startswith(text)), (joined, text)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("name", CASES)
def test_one_entry_a_token_whole_as_streamed(server: Server, path: str, name: str) -> None:
    count = 0 if name in ("sampled", "by id") else 3
    body = body_of(server, path, name, count)
    choices = whole(server, path, body)
    for choice in choices:
        check(path, name, choice, count)
    assert streamed(server, path, body) == choices


def test_choices_are_what_their_seeds_give_alone(server: Server) -> None:
    body = body_of(server, TEXT, "several", 2) | {"echo": True}
    choices = whole(server, TEXT, body)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    for choice in choices:
        alone = body | {"n": 1, "seed": choice["ending"][2]}
        assert whole(server, TEXT, alone) == [choice] == streamed(server, TEXT, alone)
        assert choice["text"].startswith(PROMPT) and choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) > len(choice["token_ids"])
    assert streamed(server, TEXT, body) == choices


def test_a_crowd_changes_nothing(server: Server) -> None:
    bodies = [body_of(server, TEXT, name, 3) | {"echo": index % 2 == 0} for index, name in enumerate(CASES)]
    alone = [whole(server, TEXT, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(lambda body: whole(server, TEXT, body), bodies)) == alone
        assert list(pool.map(lambda body: streamed(server, TEXT, body), bodies)) == alone


def test_prompts_are_scored_alike_cold_and_cached(server: Server, llm: LLM) -> None:
    """By echo, by prompt_logprobs with and without output, over chat and offline: the same numbers."""
    prompt = "Of all the things that the sea brings, salt is the one that stays. " * 6
    body = {"model": "demo", "prompt": prompt, "max_tokens": 48, "temperature": 0, "prompt_logprobs": 2}
    cold = server.post(TEXT, body).json()["choices"][0]
    plain = server.post(TEXT, {key: value for key, value in body.items() if key != "prompt_logprobs"}).json()
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 and plain["choices"][0]["text"] == cold["text"]
    neighbour = Neighbour(server)
    assert server.post(TEXT, body).json()["choices"][0]["prompt_logprobs"] == cold["prompt_logprobs"]
    neighbour.finish()
    score = server.post(TEXT, body | {"max_tokens": 0}).json()
    assert score["choices"][0]["prompt_logprobs"] == cold["prompt_logprobs"]
    assert (score["choices"][0]["text"], score["choices"][0]["finish_reason"]) == ("", "length")
    assert score["usage"]["completion_tokens"] == 0
    echoed = server.post(TEXT, body | {"max_tokens": 0, "echo": True, "logprobs": 2}).json()["choices"][0]
    assert (echoed["text"], echoed["finish_reason"]) == (prompt, "length")
    own = [at and next(iter(at.values()))["logprob"] for at in cold["prompt_logprobs"]]
    assert echoed["logprobs"]["token_logprobs"] == own
    for most in (0, 48):
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=most), False)
        assert [at and {str(i): one.logprob for i, one in at.items()} for at in output.prompt_logprobs or []] == [
            at and {i: one["logprob"] for i, one in at.items()} for at in cold["prompt_logprobs"]
        ]
        assert output.outputs[0].text == (cold["text"] if most else "")
        assert most or (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": "demo", "messages": messages, "prompt_logprobs": 0, "temperature": 0}
    scored = server.post(CHAT, chat | {"max_tokens": 0}).json()
    assert scored["choices"][0]["message"]["content"] == "" and scored["usage"]["completion_tokens"] == 0
    assert scored["prompt_logprobs"] == server.post(CHAT, chat | {"max_tokens": 48}).json()["prompt_logprobs"]


def test_nothing_at_all_is_still_refused(server: Server, llm: LLM, survivors: Survivors) -> None:
    with survivors.watch():
        for path, form in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            for stream in (False, True):
                refused = server.post(path, {"model": "demo", "max_tokens": 0, "stream": stream, **form})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
