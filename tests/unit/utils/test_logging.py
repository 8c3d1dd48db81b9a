"""Log lines: their form, their level, and their place."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from evensong.utils.logging import ROOT, configure_logging, get_logger


@pytest.fixture(autouse=True)
def own_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    root = logging.getLogger(ROOT)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "propagate", True)
    level = root.level
    yield root
    root.setLevel(level)


def test_a_line_has_time_level_title_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "core-0")
    get_logger("evensong.somewhere").warning("request %s of %d tokens", "r1", 5)
    captured = capsys.readouterr()
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING core-0: request r1 of 5 tokens\n", captured.err)
    assert captured.out == ""


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error", "core-0")
    get_logger("evensong.a").warning("quiet")
    get_logger("evensong.a").error("heard")
    assert capsys.readouterr().err.endswith("ERROR core-0: heard\n")


def test_a_second_call_changes_level_and_title_and_doubles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error", "one")
    configure_logging("debug", "two")
    get_logger("evensong.a").debug("once")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith("DEBUG two: once")


def test_a_library_that_was_not_told_to_log_is_quiet() -> None:
    code = "from evensong.utils.logging import get_logger; get_logger('evensong.a').info('x')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""
