"""Keys over TLS: which routes are open, what a wrong key gets, and clients that come with a certificate."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest

from tests.server.harness import Server
from tests.unit.utils.test_tls import make_certificate

KEYS = ("correct-horse", "battery-staple")
AUTH = {"Authorization": f"Bearer {KEYS[1]}"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server_flags(certificate: tuple[str, str]) -> list[str]:
    return ["--api-key", ",".join(KEYS), "--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]]


def test_every_route_but_health_needs_a_key(server: Server) -> None:
    for path in ("/health", "/health/ready", "/health/progress"):
        assert server.client.get(path).status_code == 200
    document = server.client.get("/openapi.json", headers=AUTH).json()
    routes = [(m, p) for p, operations in document["paths"].items() if not p.startswith("/health") for m in operations]
    assert len(routes) > 20
    for method, path in (*routes, ("get", "/docs"), ("get", "/openapi.json"), ("get", "/nothing")):
        refused = server.client.request(method.upper(), path)
        assert refused.status_code == 401, path
        # Anthropic's routes have that API's form of error.
        named = {"type": "authentication_error"} if path.startswith("/v1/messages") else {"code": "invalid_api_key"}
        assert named.items() <= refused.json()["error"].items(), path
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 1}
    wrong = server.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer correct-horsf"})
    assert wrong.status_code == 401
    for key in KEYS:
        right = {"Authorization": f"Bearer {key}"}
        assert server.client.post("/v1/completions", json=body, headers=right).status_code == 200
    assert server.client.get("/metrics", headers=AUTH).status_code == 200


def test_the_key_is_in_no_argument_list_of_a_child(server: Server) -> None:
    for process in server.family:
        if process.pid != server.process.pid:
            for key in KEYS:
                assert key not in " ".join(process.cmdline())
                assert key not in str(process.environ())


def test_plain_http_and_unknown_certificates_get_nothing(server: Server) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=10)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health", timeout=10)
    assert server.client.get("/health").status_code == 200


def test_what_was_printed_can_be_pasted(server: Server, certificate: tuple[str, str]) -> None:
    printed = server.log.read_text()
    assert f"at {server.url}/v1" in printed and f"chat --url {server.url}/v1" in printed
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "complete", "--url", f"{server.url}/v1"]
    environment = {**os.environ, "SSL_CERT_FILE": certificate[0], "EVENSONG_API_KEY": KEYS[0]}
    done = subprocess.run(
        [*command, "--prompt", "Once upon"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
