"""The folder of one launch's sockets: private, short enough for a socket's path, gone when its owner is gone.

The owner holds a lock on the folder as long as it lives, so a folder whose lock is free belongs to a dead launch and
is swept by the next one; process ids, which are reused, play no part.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "evensong-"
# A user's own folder may begin with our name too.
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{8}")
# sun_path of sockaddr_un holds 108 bytes with the final zero (unix(7)).
MAX_SOCKET_PATH = 107
LONGEST_NAME = 20


class LaunchFolder:
    """A new 0700 folder for sockets; `remove()` ends it. Raises OSError where no folder can be made."""

    def __init__(self) -> None:
        bases = candidate_bases()
        for base in bases:
            sweep(base)
        self.launch_id = ""
        self.path, self._lock = self._make(bases)
        self._owner = os.getpid()

    def address(self, name: str) -> str:
        """The ipc address of the socket called `name` (at most LONGEST_NAME characters)."""
        assert 0 < len(name) <= LONGEST_NAME and "/" not in name
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Deletes the folder; safe to call twice, and does nothing in a forked copy of the owner."""
        if self._lock < 0 or os.getpid() != self._owner:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _make(self, bases: list[Path]) -> tuple[Path, int]:
        failure: OSError | None = None
        for base in bases:
            for _ in range(8):
                self.launch_id = secrets.token_hex(4)
                path = base / f"{PREFIX}{self.launch_id}"
                try:
                    path.mkdir(mode=0o700)
                    path.chmod(0o700)
                except FileExistsError:
                    continue
                except OSError as error:
                    failure = error
                    break
                lock = _locked(path)
                if lock is not None:
                    return path, lock
        raise failure or OSError(f"no folder for sockets could be made under {', '.join(map(str, bases))}")


def candidate_bases() -> list[Path]:
    """Folders that sockets may lie under, best first: $XDG_RUNTIME_DIR, the temp folder, /tmp."""
    wanted = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    bases: list[Path] = []
    for name in wanted:
        base = Path(name)
        longest = len(os.fsencode(base)) + 1 + len(PREFIX) + 8 + 1 + LONGEST_NAME
        usable = name and base.is_absolute() and longest <= MAX_SOCKET_PATH and os.access(base, os.W_OK | os.X_OK)
        if usable and base not in bases:
            bases.append(base)
    if not bases:
        raise OSError(f"no writable folder with a path short enough for sockets among {wanted}")
    return bases


def sweep(base: Path) -> list[Path]:
    """Removes folders under `base` that dead launches of this user left; returns them."""
    swept: list[Path] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if not _NAME.fullmatch(entry.name) or not _is_own_folder(entry):
                continue
            path = Path(entry.path)
            lock = _locked(path)
            if lock is None:
                continue
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            swept.append(path)
    return swept


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        info = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and stat.S_IMODE(info.st_mode) == 0o700
    return False


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of the folder at `path`, None if someone else holds it or the folder is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sweeper may have held the lock, and deleted the folder, between our mkdir and here.
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
