"""Fixtures that every test package shares."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evensong.sources.cache import cache_dir
from evensong.sources.resolve import resolve_model

# Here servers, clients and helpers share the cores, so torch's threads sleep at once (see executor/uniproc.py). Read
# when torch is first imported, which collecting tests does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# No test asks a hub on the net: unknown names are refused at once. Read when the hub's library is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell's background jobs start with SIGINT ignored, and children inherit that: Ctrl-C tests would test nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> Iterator[None]:
    """A cache of the run's own, for servers too: what tests pack goes with it; what was fetched is the user's."""
    with tempfile.TemporaryDirectory(prefix="evensong-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("models", "tokenizers"):
            kept = cache_dir() / name
            kept.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).symlink_to(kept)
        patch.setenv("EVENSONG_CACHE", folder)
        yield


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's .gguf file in the cache, fetched on first use."""
    return resolve_model("demo", progress=False).path
