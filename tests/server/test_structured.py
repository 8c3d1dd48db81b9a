"""Structured output on the real server: every kind, whole and streamed, alone and in company; and what is refused."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from tests.server.harness import Neighbour, Server, Survivors, events

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer"},
        "moods": {"type": "array", "items": {"enum": ["😀", "日本", "café"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "moods"],
    "additionalProperties": False,
}
PROMPT = "Describe a person of the village as JSON:\n"


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--max-num-batched-tokens", "96"]


def body(structure: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    """A completion that must have a form."""
    base = {"model": "demo", "prompt": PROMPT, "max_tokens": 96, "temperature": 0.9, "seed": 3}
    return base | ({} if structure is None else {"structured_outputs": structure}) | fields


STRUCTURES: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "json, compact": {"json": PERSON, "disable_any_whitespace": True},
    "json object": {"json_object": True},
    "choice": {"choice": ["the sea", "the 山", "nobody 😀"]},
    "regex": {"regex": r"\d{4}-\d{2}-\d{2} (日|月){2,4}"},
    "grammar": {"grammar": 'root ::= word (" " word){3,9} "."\nword ::= [a-zé]{2,8}'},
    "lark": {"grammar": 'start: NUMBER ("+" NUMBER)~2..5 "=" NUMBER\nNUMBER: /[0-9]{1,3}/'},
    "structural tag": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "tags_with_separator",
                "separator": "\n",
                "at_least_one": True,
                "stop_after_first": True,
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<person>",
                        "content": {"type": "json_schema", "json_schema": PERSON},
                        "end": "</person>",
                    }
                ],
            },
        }
    },
}


def fits(name: str, text: str) -> bool:
    """Whether a text has the form."""
    match name:
        case "json":
            return jsonschema_rs.is_valid(PERSON, json.loads(text))
        case "json, compact":
            return jsonschema_rs.is_valid(PERSON, json.loads(text)) and "\n" not in text
        case "json object":
            return isinstance(json.loads(text), dict)
        case "choice":
            return text in STRUCTURES[name]["choice"]
        case "regex":
            return re.fullmatch(STRUCTURES[name]["regex"], text, re.ASCII) is not None
        case "grammar":
            return re.fullmatch(r"[a-zé]{2,8}( [a-zé]{2,8}){3,9}\.", text) is not None
        case "lark":
            return re.fullmatch(r"\d{1,3}(\+\d{1,3}){2,5}=\d{1,3}", text) is not None
        case _:
            inner = text.removeprefix("<person>").removesuffix("</person>")
            return len(inner) + 17 == len(text) and jsonschema_rs.is_valid(PERSON, json.loads(inner))


def choice_of(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    response = server.post(TEXT, request)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_kind_has_its_form_whole_and_streamed_alone_and_in_company(name: str, server: Server) -> None:
    request = body(STRUCTURES[name], logprobs=2)
    alone = choice_of(server, request)
    if alone["finish_reason"] == "stop":
        assert fits(name, alone["text"]), alone["text"]
    else:
        assert name == "json object" and alone["finish_reason"] == "length", alone
    neighbour = Neighbour(server)
    with server.client.stream("POST", TEXT, json=request | {"stream": True}) as response:
        chunks = [event["choices"][0] for event in events(response)]
    assert "".join(chunk["text"] for chunk in chunks) == alone["text"]
    assert chunks[-1]["finish_reason"] == alone["finish_reason"]
    assert [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]] == (
        alone["logprobs"]["token_logprobs"]
    )
    neighbour.finish()


def test_16_streams_of_different_forms_are_as_they_are_alone(server: Server) -> None:
    requests = [body(STRUCTURES[name], seed=seed) for seed in range(2) for name in STRUCTURES]
    alone = [choice_of(server, request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        together = list(threads.map(lambda request: choice_of(server, request), requests))
    assert [one["text"] for one in together] == [one["text"] for one in alone]
    done = [
        (name, one["text"]) for (_, name), one in zip(_pairs(), alone, strict=True) if one["finish_reason"] == "stop"
    ]
    assert len(done) >= len(requests) // 2
    assert [pair for pair in done if not fits(*pair)] == []


def _pairs() -> list[tuple[int, str]]:
    return [(seed, name) for seed in range(2) for name in STRUCTURES]


def test_a_long_prompt_in_chunks_and_from_the_cache(server: Server) -> None:
    prompt = " ".join(f"Villager {i} has {i * 7 % 13} boats." for i in range(60)) + " " + PROMPT
    request = body({"json": PERSON}, prompt=prompt, cache_salt="structured")
    cold, warm = server.post(TEXT, request).json(), server.post(TEXT, request).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
    assert jsonschema_rs.is_valid(PERSON, json.loads(cold["choices"][0]["text"]))


def test_the_official_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        {"type": "json_object"},
        {"type": "text"},
    ]
    for form in formats:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": PROMPT}],
            response_format=form,
            max_completion_tokens=160,
            seed=5,
        )
        text = answer.choices[0].message.content or ""
        if form["type"] == "json_schema":
            assert answer.choices[0].finish_reason == "stop" and jsonschema_rs.is_valid(PERSON, json.loads(text))
        elif form["type"] == "json_object" and answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_several_choices_each_have_the_form(server: Server) -> None:
    answer = server.post(TEXT, body({"json": PERSON}, n=3)).json()
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        assert jsonschema_rs.is_valid(PERSON, json.loads(choice["text"]))
        again = choice_of(server, body({"json": PERSON}, seed=choice["seed"]))
        assert again["text"] == choice["text"]


def test_max_tokens_may_cut_a_value(server: Server) -> None:
    request = body({"json": PERSON}, max_tokens=9)
    whole = choice_of(server, request)
    assert whole["finish_reason"] == "length"
    with server.client.stream("POST", TEXT, json=request | {"stream": True}) as response:
        chunks = [event["choices"][0] for event in events(response)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == "length"


def test_settings_that_change_logits_obey_the_grammar(server: Server) -> None:
    more: dict[str, Any] = {"repetition_penalty": 1.5, "bad_words": ["name"], "logit_bias": {"49": 20}, "min_tokens": 3}
    choice = choice_of(server, body({"regex": "[a-z]{3,30}"}, **more))
    assert re.fullmatch("[a-z]{3,30}", choice["text"])


def test_masks_that_leave_nothing_end_the_request_cleanly(server: Server) -> None:
    choice = choice_of(server, body({"regex": "[0-9]{5}"}, allowed_token_ids=[260]))
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "no_token_allowed")


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


def schema(value: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


TERMINALS = "\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(300)), 'R300: "a"'])
REFUSED: dict[str, list[dict[str, Any]]] = {
    "malformed schemas": [
        schema({"type": "nothing"}),
        schema({"type": "object", "properties": []}),
        schema({"$ref": "#/nowhere"}),
        schema({"$ref": "https://example.com/schema"}),
        chat(structured_outputs={"json": "{"}),
        chat(structured_outputs={"json": "[]"}),
        chat(response_format={"type": "json_schema"}),
        chat(response_format={"type": "magic"}),
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": "text"}}),
    ],
    "malformed regexes and grammars": [
        chat(structured_outputs={"regex": "((("}),
        chat(structured_outputs={"regex": "(?<=a)b"}),
        chat(structured_outputs={"grammar": "root ::= ((("}),
        chat(structured_outputs={"grammar": "root ::= missing"}),
        chat(structured_outputs={"grammar": "start: %json {broken"}),
        chat(structured_outputs={"structural_tag": {"type": "structural_tag", "format": {"type": "magic"}}}),
    ],
    "fields that say nothing, or two things": [
        chat(structured_outputs={}),
        chat(structured_outputs={"json": {}, "regex": "a"}),
        chat(structured_outputs={"choice": []}),
        chat(structured_outputs={"choice": ["a"], "surprise": 1}),
        chat(structured_outputs={"regex": "a", "backend": "magic"}),
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        chat(structured_outputs={"regex": "\ud800"}),
        chat(structured_outputs={"choice": ["\ud800"]}),
        schema({"const": "\ud800"}),
        chat(thinking_token_budget=5),
        chat(thinking_token_budget=-1),
    ],
    "what explodes": [
        schema(nested(60)),
        schema({"type": "array", "minItems": 10**9}),
        schema({"type": "string", "minLength": 10**9, "maxLength": 10**18}),
        schema({"enum": [f"{i:09d}" for i in range(30_000)]}),
        chat(structured_outputs={"regex": "(" * 20_000}),
        chat(structured_outputs={"regex": "a" * 300_000}),
        chat(structured_outputs={"grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5000))])}),
        chat(structured_outputs={"grammar": TERMINALS}),
        chat(structured_outputs={"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}),
    ],
    "keywords that are not enforced": [
        schema({"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}}),
        schema({"type": "array", "uniqueItems": True}),
        schema({"type": "array", "contains": {"type": "integer"}}),
    ],
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_enforced_is_refused_twice_the_same(row: str, server: Server, survivors: Survivors) -> None:
    with survivors.watch():
        for request in REFUSED[row]:
            answers = []
            for stream in (False, True):
                began = time.monotonic()
                response = server.client.post(
                    CHAT, content=json.dumps(request | {"stream": stream}), headers={"Content-Type": "application/json"}
                )
                assert time.monotonic() - began < 20
                assert 400 <= response.status_code < 500, (request, response.text)
                error = response.json()["error"]
                assert error["message"] and error["type"] and "\n" not in error["message"], error
                answers.append(error)
            assert answers[0] == answers[1]


def test_a_keyword_that_is_not_enforced_is_named(server: Server) -> None:
    response = server.post(CHAT, schema({"type": "array", "contains": {"type": "integer"}}))
    error = response.json()["error"]
    assert response.status_code == 400 and "'contains'" in error["message"] and error["param"] == "response_format"


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing(
    server: Server, survivors: Survivors
) -> None:
    with survivors.watch():
        for index in range(4):
            slow = chat(structured_outputs={"grammar": TERMINALS.replace('"a"', f'"a{index}"')})
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + CHAT, json=slow, timeout=0.15)
        until = time.monotonic() + 30
        while server.client.get("/load").json()["server_load"] > 1 and time.monotonic() < until:
            time.sleep(0.1)
    assert server.client.get("/load").json()["server_load"] == 0
    assert server.metric("num_requests_waiting") == 0 and server.metric("num_requests_running") == 0


def test_xgrammar_is_asked_for_by_name(server: Server) -> None:
    pytest.importorskip("xgrammar", reason="the second backend is optional")
    plain = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    choice = choice_of(server, body({"json": plain, "backend": "xgrammar"}))
    assert jsonschema_rs.is_valid(plain, json.loads(choice["text"]))
    refused = server.post(TEXT, body({"json": {"type": "string", "pattern": "a"}, "backend": "xgrammar"}))
    assert refused.status_code == 400 and "pattern" in refused.json()["error"]["message"]
