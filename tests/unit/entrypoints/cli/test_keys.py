"""API keys in the environment: every command reads them in the same way."""

from __future__ import annotations

import pytest

from evensong.entrypoints.cli.bench.target import key_header
from evensong.entrypoints.cli.keys import keys_in_environment


def test_keys_have_commas_between_and_no_space_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSONG_API_KEY", " one, two,,")
    assert keys_in_environment() == ("one", "two")
    monkeypatch.delenv("EVENSONG_API_KEY")
    assert keys_in_environment() == ()


def test_a_benchmark_bears_one_of_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    monkeypatch.setenv("EVENSONG_API_KEY", "one,two")
    assert key_header() == {"Authorization": "Bearer one"}
    monkeypatch.setenv("EVENSONG_API_KEY", "")
    assert key_header() == {"Authorization": "Bearer other"}
    monkeypatch.delenv("OPENAI_API_KEY")
    assert key_header() == {}
