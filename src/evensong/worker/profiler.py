"""One rank's profiler: started and stopped by control verbs; its part of the trace goes into the configured folder."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

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
        self._part: Path | None = None

    def start(self, prefix: str | None = None) -> str:
        """Starts; the path of the part that `stop` writes.

        Raises RequestError: no folder was given, it runs already, `prefix` is no plain name.
        """
        if self._folder is None:
            raise RequestError("profiling needs --torch-profiler-dir", status=CONFLICT)
        if self._part is not None:
            raise RequestError("the profiler runs already", status=CONFLICT)
        if prefix is not None and not _SAFE_PREFIX.fullmatch(prefix):
            raise RequestError("profile_prefix must be a plain name of at most 64 characters", param="profile_prefix")
        self._device.start_trace()
        self._part = self._folder / f"{prefix or DEFAULT_PREFIX}.{time.time_ns()}.rank{self._rank}.part"
        return str(self._part)

    def stop(self) -> None:
        """Stops and writes the part. Raises RequestError: nothing runs, or it cannot be written (then none is left)."""
        if self._part is None:
            raise RequestError("the profiler does not run", status=CONFLICT)
        part, self._part = self._part, None
        try:
            with PartWriter(part, rank_process(self._rank), rank_title(self._rank)) as writer:
                self._device.stop_trace(writer)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise RequestError(f"the trace cannot be written: {error}", status=CONFLICT) from error

    def drop(self) -> None:
        """Stops, where it runs, and writes nothing."""
        if self._part is not None:
            self._part = None
            with PartWriter(os.devnull, rank_process(self._rank), rank_title(self._rank)) as nowhere:
                self._device.stop_trace(nowhere)


def _usable(folder: str) -> Path:
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--torch-profiler-dir {folder!r} cannot be used: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--torch-profiler-dir {folder!r} cannot be used: it cannot be written to")
    return path
