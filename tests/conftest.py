"""Fixtures that every test package shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from evensong.sources.resolve import resolve_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's .gguf file in the cache, fetched on first use."""
    return resolve_model("demo", progress=False).path
