"""The examples run, on the real demo model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.server.harness import Server

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Those that talk to a server take its address; the others are engines of their own.
OF_A_SERVER = {"chat_client", "logprobs", "messages", "reasoning", "responses", "tools"}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--reasoning-parser", "qwen3"]


def run(path: Path, *arguments: str) -> str:
    """What an example prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_one_of_these() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names >= OF_A_SERVER and len(names - OF_A_SERVER) >= 5


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem in OF_A_SERVER], ids=lambda path: path.stem)
def test_a_client_runs(path: Path, server: Server) -> None:
    assert run(path, f"{server.url}/v1").strip()


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem not in OF_A_SERVER], ids=lambda path: path.stem)
def test_an_engine_of_its_own_runs(path: Path, demo_model: Path) -> None:
    assert run(path).strip()
