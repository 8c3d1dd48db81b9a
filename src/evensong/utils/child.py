"""One child process: a fresh interpreter in a process group of its own, its lifeline, its log, its end.

The child inherits the reading end of a pipe. It reads its orders there (utils/lifeline.py), and the end of that file
later means that the parent is gone, however it went. What the child prints passes through the parent, which keeps the
last lines for the error that names it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import site
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import evensong

LENGTH = struct.Struct("<I")
TAIL_LINES = 40
SHOWN_LINES = 3
MAX_LINE_BYTES = 2000
STDERR_FD = 2
# Settings that only one process may read; they reach it over the handshake.
PRIVATE_VARIABLES = ("EVENSONG_API_KEY",)
# Log lines of utils/logging.py that tell of no fault.
_ORDINARY_NEWS = re.compile(rb'\d\d:\d\d:\d\d (DEBUG|INFO) |\{"time": "[^"]*", "level": "(DEBUG|INFO)"')


class NoChildError(OSError):
    """No process could be started; the message says why."""


class LogTail:
    """Passes a child's output on to this process's stderr, as it comes, and remembers its last lines."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of output."""
        # A progress bar rewrites its line with carriage returns; each rewrite counts as a line.
        *lines, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._lines.extend(line[:MAX_LINE_BYTES] for line in lines if line.strip())
        self._rest = rest[:MAX_LINE_BYTES]

    def last(self, count: int = SHOWN_LINES) -> str:
        """The last `count` lines as one line for an error, empty when nothing was printed.

        News of an ordinary day are no cause of anything and are left out.
        """
        lines = [*self._lines, *([self._rest] if self._rest.strip() else [])]
        lines = [line for line in lines if not _ORDINARY_NEWS.match(line)][-count:]
        return " | ".join(line.decode("utf-8", "replace").strip() for line in lines)


class Child:
    """A child that runs; `on_exit` is called once, from another thread, when it has ended by itself or been killed.

    `orders` are its first bytes; `variables` replace those of its environment. In a session of its own no terminal
    reaches it. Within the parent's session it has a process group of its own: that of a stopped child ends with the
    parent, as the kernel hangs up on it. Raises NoChildError.
    """

    def __init__(
        self,
        title: str,
        module: str,
        orders: bytes,
        on_exit: Callable[[Child], None],
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        *,
        variables: Mapping[str, str] | None = None,
        own_session: bool = True,
    ) -> None:
        self.title = title
        self.tail = LogTail()
        self._on_exit = on_exit
        self._gone = threading.Event()
        read_end, write_end = os.pipe()
        # Closed with this object, so that a child whose start was interrupted sees the end of the file too.
        self._lifeline = open(write_end, "wb", buffering=0)  # noqa: SIM115
        try:
            self._lifeline.write(LENGTH.pack(len(orders)) + orders)
            self._process = subprocess.Popen(
                [*_interpreter(), "-m", module, "--bootstrap-fd", str(read_end), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(read_end, *pass_fds),
                start_new_session=own_session,
                process_group=None if own_session else 0,
                env={**_environment(), **(variables or {})},
            )
        except OSError as error:
            self._lifeline.close()
            raise NoChildError(f"{title} could not be started: {error}") from error
        finally:
            os.close(read_end)
        self.pid = self._process.pid
        self._tee = threading.Thread(target=self._pass_on, name=f"log of {title}", daemon=True)
        self._watch = threading.Thread(target=self._wait, name=f"watch of {title}", daemon=True)
        self._tee.start()
        self._watch.start()

    @property
    def alive(self) -> bool:
        """True until the process has ended and been reaped."""
        return not self._gone.is_set()

    def terminate(self) -> None:
        """Asks the process to end (SIGTERM to it alone; it ends what it started)."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process and all that it started, at once."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout: float) -> bool:
        """Waits until the process is gone, at most `timeout` seconds; True if it is."""
        return self._gone.wait(max(timeout, 0.0))

    def release(self) -> None:
        """Frees what the parent holds for a child that is gone, or must go."""
        self._lifeline.close()

    def ending(self) -> str:
        """How it ended and what it said last, in one line: `exit code 1: ...`, `killed by SIGKILL`."""
        code = self._process.returncode
        if code is None:
            how = "still running"
        elif code < 0:
            how = f"killed by {_signal_name(-code)}"
        else:
            how = f"exit code {code}"
        last = self.tail.last()
        return f"{how}: {last}" if last else how

    def _pass_on(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream, contextlib.suppress(OSError, ValueError):
            while data := os.read(stream.fileno(), 65536):
                self.tail.feed(data)
                _write_all(data)

    def _wait(self) -> None:
        # The process is waited for but not reaped yet: as long as it is a zombie its number, which is the group's, is
        # not reused, so killing what is left of the group can hit nobody else.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._tee.join(timeout=0.3)
        self._gone.set()
        self._on_exit(self)


def _interpreter() -> list[str]:
    if not sys.executable:
        raise NoChildError("this Python does not know its own executable, so it cannot start the engine's process")
    # -P keeps the current folder out of the search path: a user's queue.py must not shadow the library's.
    return [sys.executable, "-P", "-X", "faulthandler"]


def _environment() -> dict[str, str]:
    """The parent's environment without private settings, with evensong found where the parent found it."""
    environment = {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}
    root = str(Path(evensong.__file__).resolve().parent.parent)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if root not in {str(Path(place).resolve()) for place in installed}:
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else root
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write_all(data: bytes) -> None:
    """`data` to stderr; a stderr that is closed or gone must not stop the child that writes to it."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(STDERR_FD, view) :]
