"""Calls that may hang."""

from __future__ import annotations

import threading
import time

from evensong.utils.threads import run_in_time


def test_a_call_is_waited_for() -> None:
    done: list[int] = []
    run_in_time(lambda: done.append(1), 60.0, "quick")
    assert done == [1]


def test_a_call_that_hangs_is_left() -> None:
    let_go = threading.Event()
    start = time.monotonic()
    run_in_time(let_go.wait, 0.05, "stuck")
    assert time.monotonic() - start < 30
    (stuck,) = [thread for thread in threading.enumerate() if thread.name == "stuck"]
    assert stuck.daemon
    let_go.set()
    stuck.join()
