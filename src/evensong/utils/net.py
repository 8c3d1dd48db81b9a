"""TCP sockets that a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import socket

BACKLOG = 2048


class ListenError(OSError):
    """A server cannot listen where it was told to; the message is one line for a person."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket that queues connections already; port 0 takes a free one. Raises ListenError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"--host {host!r} is not an address of this machine: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for the old connections' TIME_WAIT to pass.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(_why_not(host, port, error)) from error
    return listener


def base_url(listener: socket.socket, scheme: str = "http") -> str:
    """Where a client on this machine reaches `listener`: a wildcard address is shown as the loopback one."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --port (0 takes a free one)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs more rights than this user has; ports from 1024 up need none"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"
