"""General plugins: skipped by name when they fail, fatal when asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from evensong.engine.core import plugins
from evensong.protocol.errors import ConfigError


class Point:
    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name = name
        self._call = call

    def load(self) -> Callable[[], object]:
        return self._call


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three plugins, of which `broken` fails; the names of those that ran."""
    names: list[str] = []

    def broken() -> None:
        raise OSError("no such thing")

    points = [
        Point("one", lambda: names.append("one")),
        Point("broken", broken),
        Point("two", lambda: names.append("two")),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "evensong.general_plugins" else [])
    monkeypatch.delenv("EVENSONG_PLUGINS", raising=False)
    return names


def test_one_that_fails_is_named_and_skipped(ran: list[str], caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("evensong").propagate = True
    with caplog.at_level(logging.WARNING):
        assert plugins.load_general_plugins() == ["one", "two"] == ran
    assert "broken" in caplog.text and "no such thing" in caplog.text


def test_one_that_was_asked_for_must_work(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSONG_PLUGINS", "broken, two")
    with pytest.raises(ConfigError, match="plugin broken failed: no such thing"):
        plugins.load_general_plugins()
    monkeypatch.setenv("EVENSONG_PLUGINS", "two,absent")
    with pytest.raises(ConfigError, match="not installed: absent"):
        plugins.load_general_plugins()


def test_only_those_that_were_asked_for_are_loaded(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSONG_PLUGINS", "two")
    assert plugins.load_general_plugins() == ["two"] == ran
    monkeypatch.setenv("EVENSONG_PLUGINS", "")
    assert plugins.load_general_plugins() == []
