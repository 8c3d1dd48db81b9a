"""Start-up phases and how long each took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Phases:
    """Seconds by phase, in the order in which they ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside; a phase that fails is timed too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def line(self) -> str:
        """All phases in one line, for the log."""
        parts = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        return f"{', '.join(parts)}; together {sum(self.seconds.values()):.2f} s"
