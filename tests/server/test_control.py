"""Control verbs on a running server: what runs stays the same, what comes waits, and health tells the truth."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.harness import KNOWN, Neighbour, Server, Survivors

READ_SECONDS = 1.0


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--read-timeout", str(READ_SECONDS), "--stall-timeout", "1.5", "--served-model-name", "demo"]


def control(server: Server, path: str) -> dict[str, object]:
    answer = server.client.post(path)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize(
    ("stop", "go"),
    [
        ("/pause?mode=keep&clear_cache=false", "/resume"),
        ("/sleep?level=2&mode=keep", "/wake_up"),
    ],
)
def test_a_stream_stops_where_it_is_and_goes_on(server: Server, survivors: Survivors, stop: str, go: str) -> None:
    neighbour = Neighbour(server)
    control(server, stop)
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    assert server.client.get("/health").json()["held"]
    assert server.client.get("/health/ready").status_code == 503
    assert server.client.get("/health/progress").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=KNOWN, timeout=60)
        time.sleep(0.3)
        shown = neighbour.text
        time.sleep(0.3)
        assert neighbour.text == shown and neighbour.running and not waiting.done()
        control(server, go)
        assert waiting.result().json()["choices"][0]["text"] == survivors.known
    assert neighbour.finish() == survivors.neighbour
    assert server.client.get("/health/ready").status_code == 200


def test_wait_is_answered_when_they_have_finished(server: Server, survivors: Survivors) -> None:
    neighbour = Neighbour(server)
    control(server, "/pause?mode=wait")
    assert neighbour.finish() == survivors.neighbour
    control(server, "/resume")
    neighbour = Neighbour(server)
    late = server.client.post("/pause?mode=wait&timeout=0")
    assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"
    assert neighbour.finish() == survivors.neighbour
    control(server, "/resume")
    with survivors.watch():
        pass


def test_a_request_ends_by_its_id(server: Server, survivors: Survivors) -> None:
    body = {**KNOWN, "max_tokens": 2000, "ignore_eos": True}
    with survivors.watch(), ThreadPoolExecutor(1) as pool:
        headers = {"X-Request-Id": "the-long-one"}
        long = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        until = time.monotonic() + 20
        answer = {"aborted": 0}
        while answer == {"aborted": 0} and time.monotonic() < until:
            answer = server.post("/abort_requests", {"request_ids": ["the-long-one"]}).json()
        assert answer == {"aborted": 1}
        assert long.result().json()["choices"][0]["finish_reason"] == "abort"


def test_a_core_that_stands_still_is_told_from_one_that_works(server: Server, survivors: Survivors) -> None:
    core = server.child("evensong:core-0")
    neighbour = Neighbour(server)
    core.send_signal(signal.SIGSTOP)
    try:
        assert server.client.get("/health/progress").json()["status"] == "busy"
        until = time.monotonic() + 30
        while (answer := server.client.get("/health/progress")).status_code == 200 and time.monotonic() < until:
            time.sleep(0.25)
        assert answer.status_code == 503 and "not come forward" in answer.json()["error"]["message"]
        assert server.client.get("/health").status_code == 200
    finally:
        core.send_signal(signal.SIGCONT)
    assert neighbour.finish() == survivors.neighbour
    answer = server.client.get("/health/progress")
    assert answer.status_code == 200 and answer.json()["num_steps"] > 0


def say(server: Server, *parts: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to these bytes until it closes the connection, or 10 s."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ((b"GARBAGE\r\n\r\n",), 400, b"bad_request"),
        ((b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",), 400, b"bad_request"),
        ((b"GET / HTTP/9.9\r\n\r\n",), 400, b"bad_request"),
        ((b"GET /health HTTP/1.1\r\nContent-Length: x\r\n\r\n",), 400, b"bad_request"),
        ((b"GET /health HTTP/1.1\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",), 431, b"headers_too_large"),
        ((b"GET /health HTTP/1.1\r\n", b"A: b\r\n" * 15_000), 431, b"headers_too_large"),
        ((b"GET /health HTTP/1.1\r\nHost: a",), 408, b"request_timeout"),
        ((POST + b"\r\n{",), 408, b"request_timeout"),
    ],
)
def test_what_the_http_library_refuses_has_the_usual_form(
    server: Server, parts: tuple[bytes, ...], status: int, code: bytes
) -> None:
    answer = say(server, *parts)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"content-type: application/json" in answer and b'"code": "%s"' % code in answer.replace(b'":"', b'": "')


def test_a_refusal_is_not_lost_behind_what_a_client_goes_on_to_send(server: Server) -> None:
    """Closed with bytes unread, the connection would be reset, and the answer with it every other time."""
    for _ in range(40):
        answer = say(server, b"GET /health HTTP/1.1\r\n", b"A: b\r\n" * 40_000)
        assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]


def test_a_refused_client_cannot_send_for_ever(server: Server) -> None:
    began = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
        pytest.raises(OSError),
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        while time.monotonic() - began < 30:
            connection.sendall(b"A: b\r\n" * 10_000)
    assert time.monotonic() - began < 10


def test_an_offer_to_speak_http_2_is_declined_and_the_body_read(server: Server) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    offer = b"Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n"
    answer = say(server, POST.replace(b"100", b"%d" % len(body)) + offer + body)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]


def test_slow_connections_end(server: Server, survivors: Survivors) -> None:
    with survivors.watch():
        began = time.monotonic()
        assert say(server) == b""
        # A byte now and then does not make it last.
        with pytest.raises(OSError):
            say(server, *(bytes([letter]) for letter in b"GET /health HTTP/1.1\r\nHost"), pause=0.2)
        assert time.monotonic() - began < 20
