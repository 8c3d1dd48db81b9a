"""One rank's profiler: started and stopped by control verbs; its part of the trace goes into the configured folder."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from evensong.observe.chrome_trace import PartWriter, rank_process, rank_title
from evensong.protocol.errors import ConfigError, RequestError
from evensong.worker.device import Device

CONFLICT = 409
DEFAULT_PREFIX = "evensong"
_SAFE_PREFIX = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9._\-]{0,63}")


class Profiler:
    """Idle, and without cost, until `start`. Used in the worker's thread alone.

    Raises ConfigError for a folder that cannot be made or written to.
    """

    def __init__(self, folder: str | None, device: Device, rank: int) -> None:
        self._folder = None if folder is None else _usable(folder)
        self._device = device
        self._rank = rank
        self._running: tuple[Path, Callable[[PartWriter], None]] | None = None

    def act(self, verb: Literal["start", "stop", "drop"], prefix: str | None = None) -> str | None:
        """One of the verbs below; the path where it is `start`."""
        if verb == "start":
            return self.start(prefix)
        if verb == "stop":
            self.stop()
        else:
            self.drop()
        return None

    def start(self, prefix: str | None = None) -> str:
        """Starts; the path of the part that `stop` writes.

        Raises RequestError: no folder was given, it runs already, `prefix` is no plain name.
        """
        if self._folder is None:
            raise RequestError("profiling needs --torch-profiler-dir", status=CONFLICT)
        if self._running is not None:
            raise RequestError("the profiler runs already", status=CONFLICT)
        if prefix is not None and not _SAFE_PREFIX.fullmatch(prefix):
            raise RequestError("profile_prefix must be a plain name of at most 64 characters", param="profile_prefix")
        part = self._folder / f"{prefix or DEFAULT_PREFIX}.{time.time_ns()}.rank{self._rank}.part"
        self._running = part, self._device.start_trace()
        return str(part)

    def stop(self) -> None:
        """Stops and writes the part. Raises RequestError: nothing runs, or it cannot be written (then none is left)."""
        if self._running is None:
            raise RequestError("the profiler does not run", status=CONFLICT)
        (part, write), self._running = self._running, None
        try:
            with PartWriter(part, rank_process(self._rank), rank_title(self._rank)) as writer:
                write(writer)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise RequestError(f"the trace cannot be written: {error}", status=CONFLICT) from error

    def drop(self) -> None:
        """Stops, where it runs, and writes nothing."""
        if self._running is not None:
            (_, write), self._running = self._running, None
            with PartWriter(os.devnull, rank_process(self._rank), rank_title(self._rank)) as nowhere:
                write(nowhere)


def _usable(folder: str) -> Path:
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--torch-profiler-dir {folder!r} cannot be used: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--torch-profiler-dir {folder!r} cannot be used: it cannot be written to")
    return path
