"""The folder of packed weights: what is left of killed writers, and what nobody has used for long."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections import Counter
from pathlib import Path

KEEP_BYTES = 20 << 30
KEEP_DAYS = 30
# Files of one model: its dtypes and instruction sets, and those of a build or two before this one.
KEEP_OF_A_MODEL = 6
LOCK_NAME = ".lock"
PART_SUFFIX = ".part"


def sweep(folder: Path) -> None:
    """Removes the files of writers that ended without a commit. The caller holds the folder's lock.

    A writer holds a lock on its file for as long as it lives, however it ends.
    """
    for path in folder.glob(f".*{PART_SUFFIX}"):
        _remove_unlocked(path)


def prune(folder: Path, keep_bytes: int = KEEP_BYTES, keep_days: float = KEEP_DAYS, fresh: Path | None = None) -> None:
    """Removes files of packed weights: those unused for `keep_days`, and the longest unused beyond `keep_bytes`, or
    beyond KEEP_OF_A_MODEL whose names differ in their key alone.

    `fresh` stays, and counts. A process that has a removed file mapped keeps its pages. The caller holds the folder's
    lock.
    """
    found = []
    for path in folder.glob("*.bin"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    room, oldest = keep_bytes, time.time() - keep_days * 86400
    of_model: Counter[str] = Counter()
    for used, size, path in sorted(found, key=lambda item: (item[2] != fresh, -item[0])):
        room -= size
        model, _, _ = path.stem.rpartition("-")
        of_model[model] += bool(model)
        if path != fresh and (room < 0 or used < oldest or of_model[model] > KEEP_OF_A_MODEL):
            with contextlib.suppress(OSError):  # another run may
                path.unlink(missing_ok=True)
    for path in folder.glob("*.bin.lock"):
        if not path.with_suffix("").exists():
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Removes a file that no process holds locked."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
