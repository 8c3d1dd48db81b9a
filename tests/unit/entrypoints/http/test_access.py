"""Keys, cross-origin calls, prefixes, and headers that every response has, refusals and failures too."""

from __future__ import annotations

import logging

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from evensong.entrypoints.http.middleware import key_name
from tests.unit.entrypoints.http.serving import Served, run

PAGE = "http://page.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def broken(request: Request) -> Response:
    raise ZeroDivisionError


def tell_names(served: Served) -> list[str | None]:
    """A route that notes by which name a request's key is known."""
    names: list[str | None] = []

    async def note(request: Request) -> PlainTextResponse:
        names.append(request.state.api_key_name)
        return PlainTextResponse("noted")

    served.app.router.add_route("/name", note)
    return names


def test_any_of_several_keys_opens_and_is_known_by_a_name() -> None:
    keys = ("first", "second", "dritter-schlüssel")

    async def body(served: Served) -> None:
        names = tell_names(served)
        for key in keys:
            header = f"Bearer {key}".encode()
            assert (await served.http.get("/name", headers={"Authorization": header})).status_code == 200
        assert names == [key_name(key) for key in keys] and len(set(names)) == 3
        assert key_name("first").startswith("key-") and "first" not in key_name("first")
        for wrong in ("firs", "first2", "FIRST", ""):
            refused = await served.http.get("/name", headers={"Authorization": f"Bearer {wrong}"})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"

    run(body, api_key=keys)


def test_without_keys_there_is_no_name() -> None:
    async def body(served: Served) -> None:
        names = tell_names(served)
        await served.http.get("/name", headers={"Authorization": "Bearer any"})
        assert names == [None]

    run(body)


@pytest.mark.parametrize("path", ["/ping", "/load", "/metrics", "/is_paused", "/healthy", "/docs", "/v1/health"])
def test_what_is_not_health_needs_a_key(path: str) -> None:
    async def body(served: Served) -> None:
        assert (await served.http.get(path)).status_code == 401
        for open_path, status in (("/health/progress", 200), ("/%68ealth", 200), ("/health/../v1/models", 401)):
            assert (await served.http.get(open_path)).status_code == status

    run(body, api_key=("k",))


def test_web_pages_are_served_where_they_are_allowed() -> None:
    async def body(served: Served) -> None:
        asked = await served.http.options("/v1/completions", headers=PREFLIGHT)
        assert asked.status_code == 200, "a browser asks without the key"
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "POST" in asked.headers["access-control-allow-methods"]
        other = await served.http.options("/v1/completions", headers={**PREFLIGHT, "Origin": "http://evil"})
        assert other.status_code == 400 and other.json()["error"]["code"] == "cors_refused"
        assert "access-control-allow-origin" not in other.headers
        served.app.router.add_route("/bug", broken)
        key = {"Authorization": "Bearer k", "Origin": PAGE}
        for method, path, headers, status in (
            ("GET", "/v1/models", key, 200),
            ("GET", "/v1/models", {"Origin": PAGE}, 401),
            ("GET", "/nothing", key, 404),
            ("DELETE", "/v1/models", key, 405),
            ("POST", "/v1/completions", key | {"Content-Type": "text/plain"}, 415),
            ("GET", "/bug", key, 500),
        ):
            answer = await served.http.request(method, path, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE, path
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["x-request-id"]
            if status >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "access-control-allow-origin" not in (await served.http.get("/health")).headers

    run(body, api_key=("k",), allowed_origins=(PAGE,))


def test_any_page_and_credentials() -> None:
    async def body(served: Served) -> None:
        answer = await served.http.get("/health", headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"

    run(body, allowed_origins=("*",))

    async def with_credentials(served: Served) -> None:
        answer = await served.http.get("/health", headers={"Origin": PAGE, "Cookie": "a=b"})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-credentials"] == "true"

    run(with_credentials, allowed_origins=("*",), allow_credentials=True)


def test_by_default_no_page_is_served() -> None:
    async def body(served: Served) -> None:
        assert (await served.http.options("/v1/completions", headers=PREFLIGHT)).status_code == 405
        answer = await served.http.get("/health", headers={"Origin": PAGE})
        assert not [name for name in answer.headers if name.startswith("access-control")]

    run(body)


def test_a_prefix_may_be_left_or_taken_away() -> None:
    async def body(served: Served) -> None:
        for prefix in ("", "/api"):
            assert (await served.http.get(f"{prefix}/health")).status_code == 200
            assert (await served.http.get(f"{prefix}/v1/models")).status_code == 401
            allowed = await served.http.get(f"{prefix}/v1/models", headers={"Authorization": "Bearer k"})
            assert allowed.status_code == 200
        assert (await served.http.get("/apihealth")).status_code == 401
        document = await served.http.get("/openapi.json", headers={"Authorization": "Bearer k"})
        assert document.json()["servers"] == [{"url": "/api"}]

    run(body, api_key=("k",), root_path="/api")


def test_head_is_get_without_a_body() -> None:
    async def body(served: Served) -> None:
        for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/completions", 405), ("/nothing", 404)):
            answer = await served.http.head(path)
            assert (answer.status_code, answer.content) == (status, b"")
        assert (await served.http.put("/ping")).headers["allow"] == "GET, HEAD, POST"

    run(body)


def test_the_description_holds_together_and_can_be_left_out() -> None:
    async def body(served: Served) -> None:
        document = (await served.http.get("/openapi.json")).json()
        known = document["components"]["schemas"]
        text = str(document)
        for name in {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}:
            assert name in known
        assert {"ChatForm", "StreamOptions", "Error"} <= set(known) and "$defs" not in text
        page = await served.http.get("/docs")
        assert page.status_code == 200 and "/v1/chat/completions" in page.text and "max_completion_tokens" in page.text
        assert "<script" not in page.text and "http" not in page.text.replace("X-Request-Id", "")
        assert (await served.http.get("/redoc")).status_code == 404

    run(body)

    async def without(served: Served) -> None:
        for path in ("/docs", "/openapi.json"):
            assert (await served.http.get(path)).status_code == 404

    run(without, disable_fastapi_docs=True)


def test_a_line_for_each_request_where_it_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evensong")

    async def body(served: Served) -> None:
        await served.http.get("/v1/models/x?key=secret", headers={"X-Request-Id": "abc"})

    run(body)
    assert not [record for record in caplog.records if record.name.startswith("evensong")]
    run(body, access_log=True)
    line = next(record.getMessage() for record in caplog.records if record.name.startswith("evensong"))
    assert line.startswith("127.0.0.1 GET /v1/models/x 404 ") and line.endswith("id=abc") and "secret" not in line
