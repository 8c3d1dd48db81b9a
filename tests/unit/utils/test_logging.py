"""One handler, whatever it is called."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from evensong.utils.logging import configure_logging, get_logger


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    root = logging.getLogger("evensong")
    before = root.handlers[:], root.level, root.propagate
    root.handlers[:] = []
    yield
    root.handlers[:], root.level, root.propagate = before


def test_lines_name_level_and_title_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "core-0")
    configure_logging("info", "core-1")
    get_logger("evensong.some.module").info("hello")
    get_logger("evensong.some.module").debug("too fine")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO core-1: hello")
