"""Start-up messages between the launcher and its children (spec B1)."""

from __future__ import annotations

import msgspec

from evensong.protocol.kv_spec import Resources


class Bootstrap(msgspec.Struct):
    """First bytes that a child reads from its inherited pipe; the pipe's end-of-file later means the parent died."""

    token: bytes
    handshake_address: str
    role: str
    index: int
    incarnation: int


class Hello(msgspec.Struct):
    """Child -> launcher: I run. `local` is True for a process on the launcher's machine."""

    role: str
    index: int
    pid: int
    local: bool = True


class ClientAddress(msgspec.Struct):
    """Sockets of one front end: it binds both, cores connect."""

    client_index: int
    requests: str
    outputs: str


class CoreInit(msgspec.Struct):
    """Launcher -> core: the settings (config/, as msgpack) and every front end's sockets.

    `learned` is set for a replacement, which must come up with the first core's values. `progress_fd` is inherited:
    the core's progress page (utils/progress.py), -1 for none.
    """

    config: msgspec.Raw
    clients: list[ClientAddress]
    learned: Resources | None = None
    progress_fd: int = -1


class HttpInit(msgspec.Struct):
    """Launcher -> HTTP process: the settings (of the engine, and of the server), its own sockets, the progress page."""

    config: msgspec.Raw
    client: ClientAddress
    num_engines: int = 1
    server: msgspec.Raw = msgspec.Raw(b"\xc0")
    progress_fd: int = -1


class Ready(msgspec.Struct):
    """Child -> launcher: it can take requests; a front end repeats its core's values."""

    resources: Resources


class Failed(msgspec.Struct):
    """Child -> launcher: it cannot start. `usage` marks a mistake of the user's (exit code 2)."""

    message: str
    usage: bool = False


class Member(msgspec.Struct):
    """One core as the launcher knows it. `state` is one of NEW, CONNECTED, READY, DEAD."""

    index: int
    incarnation: int
    state: str
    resources: Resources | None = None
    reason: str | None = None


# Phases of start-up, as /health/ready shows them. From LOADING on the model's files are on this machine.
FETCHING, LOADING, STARTED = "fetching the model", "loading the model", ""


class Membership(msgspec.Struct):
    """Launcher -> front ends: every core, whether the launch is draining, and what start-up is busy with."""

    members: list[Member]
    draining: bool = False
    phase: str = ""
