"""The listening socket: what a person reads when it cannot be had."""

from __future__ import annotations

import socket

import pytest

from evensong.utils.net import ListenError, base_url, listening_socket


def test_a_free_port_accepts_connections_before_anyone_serves() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        assert base_url(listener) == f"http://127.0.0.1:{address[1]}"
        with socket.create_connection(address, timeout=1):
            pass


def test_a_busy_port_is_named() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            listening_socket("127.0.0.1", port)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no.such.host.invalid", "is not an address"),
        ("192.0.2.1", "is not an address"),
        ("a" * 300, "is not an address"),
    ],
)
def test_an_address_of_another_machine_is_named(host: str, words: str) -> None:
    with pytest.raises(ListenError, match=words):
        listening_socket(host, 0)


def test_a_privileged_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ListenError, match="port 80 on 127.0.0.1 needs more rights"):
        listening_socket("127.0.0.1", 80)


def test_wildcards_and_ipv6_are_shown_as_something_to_paste() -> None:
    with listening_socket("0.0.0.0", 0) as listener:
        assert base_url(listener).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        with listening_socket("::1", 0) as listener:
            assert base_url(listener).startswith("http://[::1]:")
