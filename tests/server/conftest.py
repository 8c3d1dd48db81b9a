"""One server per test module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Server, Survivors


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    """Flags of the module's server; modules override it."""
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path, server_flags: list[str]) -> Iterator[Server]:
    """The module's server; it must drain and exit with 0."""
    running = Server(tmp_path_factory.mktemp("server") / "log.txt", *server_flags)
    try:
        yield running
    finally:
        code = running.stop()
    assert code == 0, running.log.read_text()[-2000:]


@pytest.fixture(scope="module")
def survivors(server: Server) -> Survivors:
    """The survivor check of the module's server."""
    return Survivors(server)
