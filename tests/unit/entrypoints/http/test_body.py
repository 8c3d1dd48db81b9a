"""Bodies: what is refused before a form is made of it, and that refusing stays cheap."""

from __future__ import annotations

import json
import resource
import time
from typing import Any

import pytest

from evensong.entrypoints.http.body import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, parse
from evensong.entrypoints.http.schemas import ChatForm, CompletionForm
from evensong.protocol.errors import RequestError
from tests.unit.entrypoints.http.serving import Served, run


def refused(body: bytes, form: type = CompletionForm) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, form)
    json.dumps(caught.value.message).encode()
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature: Input should be a finite number"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' comes twice"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "nested"),
        (b'{"prompt": ' + b"[" * 90_000, "nested"),
        (b'{"max_tokens": 4}', "prompt: Field required"),
        (b'{"prompt": "a", "stream": "yes"}', "stream: "),
        (b'{"prompt": [1, true]}', "prompt: "),
        (b'{"prompt": "a", "seed": 9223372036854775808}', "seed: "),
        (b'{"prompt": "a", "\\ud800": 1}', "string"),
    ],
)
def test_refusals_say_why(body: bytes, says: str) -> None:
    assert says in refused(body).message


def nested(depth: int) -> bytes:
    """A body with `depth` containers in each other, itself included."""
    return b'{"prompt": "a", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_the_depth_limit_is_exact() -> None:
    parse(nested(MAX_DEPTH), CompletionForm)
    assert f"more than {MAX_DEPTH} levels" in refused(nested(MAX_DEPTH + 1)).message
    # The parser's own limit gives the same answer.
    assert refused(nested(MAX_DEPTH + 1)).message == refused(nested(50_000)).message


def test_the_number_of_values_is_bounded() -> None:
    within = [1] * (MAX_VALUES - 10)
    assert parse(json.dumps({"prompt": within}).encode(), CompletionForm).prompt == within
    assert "values" in refused(json.dumps({"prompt": [1] * (MAX_VALUES + 10)}).encode()).message
    assert "values" in refused(json.dumps({"prompt": [[]] * (MAX_CONTAINERS + 1)}).encode()).message
    keys = json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(MAX_CONTAINERS)}}).encode()
    assert "values" in refused(keys).message


@pytest.mark.parametrize("text", [", " * MAX_VALUES, '[{":' * MAX_CONTAINERS, '\\",' * MAX_VALUES, "\\" * 2_000_001])
def test_what_is_in_a_string_does_not_count(text: str) -> None:
    body = json.dumps({"prompt": text, "stop": ["a\\", '"', "b"]}).encode()
    assert parse(body, CompletionForm).prompt == text


def test_an_open_string_is_not_scanned_again_and_again() -> None:
    began = time.monotonic()
    refused(b'{"prompt": "' + b'\\",' * 1_000_000)
    refused(b'{"prompt": "' + b"\\," * 1_000_000)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [1] * 300_000 + [1.5]),
        ("prompt", [{}] * 90_000),
        ("stop", [1] * 300_000),
        ("stop_token_ids", ["1"] * 300_000),
        ("logit_bias", {str(i): "x" for i in range(90_000)}),
    ],
)
def test_a_long_list_of_mistakes_is_one_complaint(field: str, value: Any) -> None:
    body = json.dumps({"prompt": "a", field: value}).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError) as caught:
        parse(body, CompletionForm).sampling_params({})
    assert caught.value.param == field
    # Megabytes, not the gigabyte that one complaint an item takes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000


def test_a_mistake_in_a_message_names_the_field() -> None:
    assert refused(b'{"messages": [1]}', ChatForm).param == "messages"


def test_content_types() -> None:
    async def body(served: Served) -> None:
        content = b'{"prompt": "a", "max_tokens": 1}'
        for kind in ("application/json", "application/json; charset=utf-8", "application/vnd.api+json"):
            answer = await served.http.post("/v1/completions", content=content, headers={"Content-Type": kind})
            assert answer.status_code == 200, kind
        assert (await served.http.post("/v1/completions", content=content)).status_code == 200
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""):
            answer = await served.http.post("/v1/completions", content=content, headers={"Content-Type": kind})
            assert answer.status_code == 415, kind
            assert answer.json()["error"]["code"] == "unsupported_media_type"

    run(body)


def test_the_size_limit_counts_what_arrives() -> None:
    async def body(served: Served) -> None:
        fits = b'{"prompt": "a", "max_tokens": 1}'.ljust(2000)
        assert (await served.http.post("/v1/completions", content=fits)).status_code == 200
        declared = await served.http.post("/v1/completions", content=fits + b" ")
        taken = 0

        async def chunks() -> Any:
            nonlocal taken
            for _ in range(100):
                taken += 500
                yield b" " * 500

        streamed = await served.http.post("/v1/completions", content=chunks())
        for answer in (declared, streamed):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        assert taken <= 3000, "it is not read on once it is too large"

    run(body, max_request_bytes=2000)
