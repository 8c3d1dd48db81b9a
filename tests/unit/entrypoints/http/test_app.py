"""Routes around generation: health, readiness, keys, ids, errors, fields that are refused, tokenizing."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.entrypoints.http.schemas import ADVISORY, UNSUPPORTED
from tests.unit.entrypoints.http.serving import Served, run

HELLO = [{"role": "user", "content": "hi"}]
WORK = (
    ("GET", "/v1/models", None),
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/v1/chat/completions", {"messages": HELLO}),
    ("POST", "/v1/responses", {"input": "a"}),
    ("POST", "/v1/messages", {"model": "demo", "max_tokens": 1, "messages": HELLO}),
    ("POST", "/v1/messages/count_tokens", {"model": "demo", "messages": HELLO}),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [20]}),
)


def starting(served: Served) -> None:
    served.state.engine = None
    served.state.phase = "loading the model"


def draining(served: Served) -> None:
    served.state.draining = True


def dead(served: Served) -> None:
    served.state.dead_reason = "killed by SIGKILL"


@pytest.mark.parametrize(
    ("enter", "says", "health"),
    [(starting, "loading the model", 200), (draining, "draining", 200), (dead, "SIGKILL", 503)],
)
def test_no_work_is_taken(enter: Any, says: str, health: int) -> None:
    async def body(served: Served) -> None:
        assert (await served.http.get("/health/ready")).status_code == 200
        engine = served.state.engine
        enter(served)
        answer = await served.http.get("/health")
        assert answer.status_code == health
        if health != 200:
            assert says in answer.json()["error"]["message"]
        for method, path, form in (*WORK, ("GET", "/health/ready", None)):
            refused = await served.http.request(method, path, json=form)
            assert refused.status_code == 503, path
            assert says in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
        assert (await served.http.get("/version")).json()["version"]
        assert (await served.http.get("/metrics")).status_code == 200
        served.state.engine = engine

    run(body)


def test_unknown_routes_and_methods() -> None:
    async def body(served: Served) -> None:
        for path in ("/nothing", "/v1/completions/", "/v1"):
            answer = await served.http.get(path, headers={"Host": "["})
            assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
        for method, path in (("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/v1/chat/completions")):
            answer = await served.http.request(method, path)
            assert answer.status_code == 405 and answer.headers["allow"]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run(body)


def test_models() -> None:
    async def body(served: Served) -> None:
        cards = (await served.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["demo"] and cards[0]["max_model_len"] == 4096
        assert (await served.http.get("/v1/models/demo")).json() == cards[0]
        other = await served.http.get("/v1/models/a/b")
        assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
        for path, form in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
            refused = await served.post(path, model="\ud800" if "chat" in path else "gpt", **form)
            assert refused.status_code == 404 and refused.json()["error"]["param"] == "model"

    run(body)


def test_request_ids() -> None:
    async def body(served: Served) -> None:
        given = await served.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "abc.1"}
        )
        assert given.headers["x-request-id"] == "abc.1" and given.json()["id"] == "cmpl-abc.1"
        for unsafe in (b"a b", b"x" * 129, b"\xff", b"", b"a\tb"):
            made = await served.http.get("/nothing", headers={"X-Request-Id": unsafe})
            assert made.headers["x-request-id"].isalnum() and made.headers["x-request-id"].encode() != unsafe

    run(body)


def test_the_key() -> None:
    key = "schlüssel"

    async def body(served: Served) -> None:
        for path in ("/health", "/health/ready"):
            assert (await served.http.get(path)).status_code == 200
        wrong = (b"", b"Bearer", b"Bearer x", b"Basic " + key.encode(), b"Bearer \xff", key.encode())
        for method, path, form in (*WORK, ("GET", "/metrics", None), ("GET", "/nothing", None), ("GET", "/docs", None)):
            for header in wrong:
                refused = await served.http.request(method, path, json=form, headers={"Authorization": header})
                assert refused.status_code == 401
                own = {"type": "authentication_error"} if "messages" in path else {"code": "invalid_api_key"}
                assert own.items() <= refused.json()["error"].items(), path
        right = {"Authorization": f"Bearer {key}".encode()}
        assert (await served.http.get("/v1/models", headers=right)).status_code == 200
        assert (await served.http.get("/metrics", headers=right)).status_code == 200

    run(body, api_key=(key, "other"))


def test_metrics_can_be_left_open() -> None:
    async def body(served: Served) -> None:
        assert (await served.http.get("/metrics")).status_code == 200
        assert (await served.http.get("/version")).status_code == 401

    run(body, api_key=("k",), metrics_no_auth=True)


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_fields_that_cannot_be_honoured_are_refused(field: str) -> None:
    async def body(served: Served) -> None:
        for path, form in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
            refused = await served.post(path, **form, **{field: {"some": "value"}})
            assert refused.status_code == 400, path
            assert refused.json()["error"]["param"] == field
            for neutral in UNSUPPORTED[field]:
                allowed = await served.post(path, **form, max_tokens=1, **{field: neutral})
                assert allowed.status_code == 200 and "x-evensong-warning" not in allowed.headers

    run(body)


def test_fields_that_nobody_knows_are_named() -> None:
    async def body(served: Served) -> None:
        quiet = await served.post("/v1/completions", prompt="a", max_tokens=1, **dict.fromkeys(ADVISORY, 1))
        assert quiet.status_code == 200 and "x-evensong-warning" not in quiet.headers
        odd = {"frob": 1, "line\r\nbreak: x": 2, "é": 3}
        for stream in (False, True):
            answer = await served.post("/v1/completions", prompt="a", max_tokens=1, stream=stream, **odd)
            warning = answer.headers["x-evensong-warning"]
            assert answer.status_code == 200 and "frob" in warning and "break" in warning
            assert "break" not in answer.headers
        many = await served.post("/v1/completions", prompt="a", max_tokens=1, **{f"field{i}": i for i in range(5000)})
        assert many.status_code == 200 and len(many.headers["x-evensong-warning"]) < 2000

    run(body)


def test_tokenize_and_back() -> None:
    async def body(served: Served) -> None:
        answer = (await served.post("/tokenize", prompt="héllo", return_token_strs=True)).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 6
        assert answer["max_model_len"] == 4096
        assert (await served.post("/detokenize", tokens=answer["tokens"])).json() == {"prompt": "héllo"}
        chat = (await served.post("/tokenize", messages=HELLO)).json()
        bare = (await served.post("/tokenize", messages=HELLO, add_generation_prompt=False)).json()
        assert chat["count"] > bare["count"] > 2
        prompt = (await served.chat(return_token_ids=True))["prompt_token_ids"]
        assert prompt == chat["tokens"]

    run(body)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": ""}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"prompt": "x" * 1_000_000}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": [[]]}]}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**30]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/detokenize", {"tokens": [20] * 5000}),
    ],
)
def test_what_cannot_be_tokenized(path: str, form: dict[str, Any]) -> None:
    async def body(served: Served) -> None:
        answers = [await served.post(path, **form) for _ in range(2)]
        assert answers[0].status_code == 400 and answers[0].json()["error"]["message"]
        assert answers[0].text == answers[1].text

    run(body)


def test_metrics_and_version() -> None:
    async def body(served: Served) -> None:
        await served.complete(prompt=[20, 21, 22], max_tokens=5)
        metrics = await served.http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in metrics.text.splitlines() if 'model_name="demo"' in line]
        assert any(line.startswith("evensong:generation_tokens_total{") and line.endswith(" 5.0") for line in lines)
        assert any(line.startswith("evensong:prompt_tokens_total{") and line.endswith(" 3.0") for line in lines)
        version = (await served.http.get("/version")).json()
        assert version["fingerprint"] == "fake" and "deterministic" in version

    run(body)


def test_the_api_is_described() -> None:
    async def body(served: Served) -> None:
        schema = (await served.http.get("/openapi.json")).json()
        assert "/v1/chat/completions" in schema["paths"]

    run(body)
