"""The process table: every kind of process that a launch may start, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessRow:
    """One kind of process. `title` is how it shows in the process list; `module` is what `python -m` runs."""

    role: str
    title: str
    module: str


@dataclass(frozen=True)
class Limits:
    """Times in seconds: until a child says HELLO, until a core is READY, and until an asked child has ended."""

    connect: float = 120.0
    ready: float = 3600.0
    exit: float = 5.0


CORE = "core"
HTTP = "http"
LAUNCHER_TITLE = "evensong:launcher"
PROCESS_TABLE: dict[str, ProcessRow] = {
    row.role: row
    for row in (
        ProcessRow(HTTP, "evensong:http-{index}", "evensong.entrypoints.http.process"),
        ProcessRow(CORE, "evensong:core-{index}", "evensong.engine.core.process"),
    )
}
LIMITS = Limits()
