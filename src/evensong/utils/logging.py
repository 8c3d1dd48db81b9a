"""Log lines on stderr: time, level, process title, message. They name ids and lengths, never prompt text."""

from __future__ import annotations

import logging
import sys

ROOT = "evensong"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure_logging(level: str, title: str) -> None:
    """Sends this process's lines to stderr from `level` on. A second call changes level and title only."""
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper())
    formatter = logging.Formatter(f"%(asctime)s %(levelname)s {title}: %(message)s", datefmt="%H:%M:%S")
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
        root.propagate = False
    for handler in root.handlers:
        handler.setFormatter(formatter)
