"""The API key: which routes are open, and what a wrong key gets."""

from __future__ import annotations

import pytest

from tests.server.harness import Server

KEY = "correct-horse"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--api-key", KEY]


def test_every_route_but_health_needs_the_key(server: Server) -> None:
    for path in ("/health", "/health/ready"):
        assert server.client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/nothing"):
        refused = server.client.get(path)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key", path
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 1}
    assert server.post("/v1/completions", body).status_code == 401
    wrong = server.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer correct-horsf"})
    assert wrong.status_code == 401
    assert server.client.post("/v1/completions", json=body, headers=AUTH).status_code == 200
    assert server.client.get("/metrics", headers=AUTH).status_code == 200


def test_the_key_is_in_no_argument_list_of_a_child(server: Server) -> None:
    for process in server.family:
        if process.pid != server.process.pid:
            assert KEY not in " ".join(process.cmdline())
            assert KEY not in str(process.environ())
