"""Every test here starts processes: each must leave none, no folder and no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.launching import children, eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def sockets_base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own place for socket folders; checks that the test left nothing."""
    base = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = set(children())
    yield base
    assert eventually(lambda: not set(children()) - before), "a process is left"
    assert eventually(lambda: not any(base.iterdir())), f"folders are left: {list(base.iterdir())}"
    left = [t.name for t in threading.enumerate() if t.name.startswith(("evensong ", "watch of", "log of"))]
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name in left]), left
