"""Log lines: their form, their level, and their place."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from evensong.utils.logging import _LIBRARIES, JSON, ROOT, configure_logging, get_logger


@pytest.fixture(autouse=True)
def own_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    loggers = [logging.getLogger(name) for name in (ROOT, *_LIBRARIES)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
    yield loggers[0]
    logging.captureWarnings(False)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


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


@pytest.mark.filterwarnings("default")
def test_json_is_one_object_a_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "http-0", JSON)
    get_logger("evensong.a").info("id %s", 'a"b\nc\u2028\ud800')
    logging.getLogger("uvicorn.error").warning("of a library")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        get_logger("evensong.a").exception("failed")
        sys.excepthook(type(error), error, None)
    warnings.warn("careful", UserWarning, stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines[:4]] == [
        'id a"b\nc\u2028\ud800',
        "of a library",
        "failed",
        "the process ends: two\nlines",
    ]
    assert "careful" in lines[4]["message"] and lines[2]["exception"].startswith("Traceback")
    assert {line["process"] for line in lines} == {"http-0"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])


def test_a_library_that_was_not_told_to_log_is_quiet() -> None:
    code = "from evensong.utils.logging import get_logger; get_logger('evensong.a').info('x')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""
