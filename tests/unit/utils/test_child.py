"""What is kept of a child's output, and what it is started with."""

from __future__ import annotations

import sys

import pytest

from evensong.utils.child import MAX_LINE_BYTES, TAIL_LINES, LogTail, NoChildError, _environment, _interpreter


def test_the_last_lines_are_one_line() -> None:
    tail = LogTail()
    assert tail.last() == ""
    tail.feed(b"one\ntwo\n\nthr")
    tail.feed(b"ee\nfour\n   \n")
    assert tail.last() == "two | three | four"
    tail.feed(
        b"09:26:47 INFO core-0: core start-up\n09:26:48 ERROR core-0: no memory\n09:26:49 INFO core-0: stopping\n"
    )
    assert tail.last(2) == "four | 09:26:48 ERROR core-0: no memory"
    tail.feed(b"no newline at the end")
    assert tail.last(2) == "09:26:48 ERROR core-0: no memory | no newline at the end"


def test_a_progress_bar_and_bytes_that_are_no_text_do_no_harm() -> None:
    tail = LogTail()
    tail.feed(b"10%\r20%\r\xff\xfe broken\n")
    assert tail.last() == "10% | 20% | \ufffd\ufffd broken"


def test_what_is_kept_is_bounded() -> None:
    tail = LogTail()
    for _ in range(10):
        tail.feed(b"x" * 1_000_000)
    tail.feed(b"\n")
    assert len(tail.last()) <= MAX_LINE_BYTES
    for number in range(10 * TAIL_LINES):
        tail.feed(b"%d\n" % number)
    assert len(tail._lines) == TAIL_LINES
    assert tail.last(1) == str(10 * TAIL_LINES - 1)


def test_the_current_folder_is_not_searched_for_modules() -> None:
    assert _interpreter()[:2] == [sys.executable, "-P"]


def test_a_python_without_an_executable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(NoChildError, match="does not know its own executable"):
        _interpreter()


def test_the_search_path_of_the_caller_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert _environment()["PYTHONPATH"].split(":")[-1] == "/somewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert "/somewhere" not in _environment().get("PYTHONPATH", "")
