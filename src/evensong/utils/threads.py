"""Threads: calls that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_in_time(call: Callable[[], object], seconds: float, name: str) -> None:
    """Runs `call` in a thread called `name`, and waits for it at most `seconds`: what hangs must not keep a process."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(timeout=seconds)
