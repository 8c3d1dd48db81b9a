"""The device's trace of one worker: started and stopped by control verbs, written into a folder given at start."""

from __future__ import annotations

import re
import time
from pathlib import Path

from evensong.protocol.errors import ConfigError, RequestError
from evensong.worker.device import Device

CONFLICT = 409
_SAFE_PREFIX = re.compile(r"[A-Za-z0-9._\-]{1,64}")


class Profiler:
    """Idle, and without cost, until `start`. Used in the worker's thread alone.

    Raises ConfigError for a folder that cannot be made.
    """

    def __init__(self, folder: str | None, device: Device) -> None:
        if folder is not None:
            try:
                Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--torch-profiler-dir {folder!r} cannot be used: {error.strerror}") from error
        self._folder = folder
        self._device = device
        self._prefix: str | None = None

    def start(self, prefix: str | None = None) -> None:
        """Starts. Raises RequestError: no folder was given, it runs already, `prefix` is no plain name."""
        if self._folder is None:
            raise RequestError("profiling needs --torch-profiler-dir", status=CONFLICT)
        if self._prefix is not None:
            raise RequestError("the profiler runs already", status=CONFLICT)
        if prefix is not None and not _SAFE_PREFIX.fullmatch(prefix):
            raise RequestError("profile_prefix must be a plain name of at most 64 characters", param="profile_prefix")
        self._prefix = prefix or "worker"
        self._device.start_trace()

    def stop(self) -> str:
        """Stops and writes a Chrome trace; its path. Raises RequestError: nothing runs, the trace cannot be written."""
        if self._prefix is None:
            raise RequestError("the profiler does not run", status=CONFLICT)
        prefix, self._prefix = self._prefix, None
        assert self._folder is not None
        path = Path(self._folder).expanduser() / f"{prefix}-rank0.{time.time_ns()}.pt.trace.json.gz"
        try:
            self._device.stop_trace(str(path))
        except OSError as error:
            raise RequestError(f"the trace cannot be written: {error}", status=CONFLICT) from error
        return str(path)
