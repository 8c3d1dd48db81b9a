"""Log lines on stderr: time, level, process title, message. They name ids and lengths, never prompt text."""

from __future__ import annotations

import json
import logging
import sys
import time

ROOT = "evensong"
TEXT, JSON = "text", "json"
# Libraries that have something to say now and then: theirs are lines like ours.
_LIBRARIES = ("asyncio", "opentelemetry", "py.warnings", "uvicorn")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, logger, message, and exception where there is one."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._title,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # ASCII only: what a file's name or a header may hold cannot break a line.
        return json.dumps(fields)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure_logging(level: str, title: str, format: str = TEXT) -> None:
    """Sends this process's lines to stderr from `level` on. A second call changes level, title and form only."""
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper())
    if format == JSON:
        formatter: logging.Formatter = JsonFormatter(title)
    else:
        formatter = logging.Formatter(f"%(asctime)s %(levelname)s {title}: %(message)s", datefmt="%H:%M:%S")
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
        root.propagate = False
    for handler in root.handlers:
        handler.setFormatter(formatter)
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers, library.propagate = root.handlers, False
        library.setLevel(max(logging.WARNING, root.level))
    if format == JSON:
        logging.captureWarnings(True)
        sys.excepthook = _log_exception


def _log_exception(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """What ends the process is a line too."""
    logging.getLogger(ROOT).critical("the process ends: %s", error, exc_info=error)
