"""Chrome's trace format (its Trace Event Format document), which chrome://tracing and Perfetto open.

One file holds all ranks. Each rank writes its events into a part, one JSON object a line with commas between; a trace
is the core's events and all parts, one after the other, so that nobody ever holds a whole trace in memory. Times are
nanoseconds of the monotonic clock, which the processes of a machine share; the format wants microseconds. In the trace
the core is process 0 and rank K is process K + 1.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

CORE_PROCESS = 0
STEPS_THREAD = 0
# Categories of spans: what a device computes, whole steps, and what the core does.
OP, STEP, CORE = "op", "step", "core"
HEAD, TAIL = '{"displayTimeUnit":"ms","traceEvents":[\n', "\n]}\n"
_SEPARATOR = ",\n"
# A trace is mostly repetition: more effort makes it a tenth smaller and takes three times as long.
_COMPRESSION = 3


def rank_process(rank: int) -> int:
    """The number of a rank's process in a trace."""
    return rank + 1


def rank_title(rank: int) -> str:
    """The name of a rank's process in a trace: that of its process where it has one of its own."""
    return f"worker-0.{rank}"


class PartWriter:
    """Writes the events of one process, as they come. Raises OSError where the file cannot be written."""

    def __init__(self, path: Path | str, process: int, title: str) -> None:
        self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self.process = process
        self._first = True
        self._quoted: dict[str, str] = {}
        self._meta("process_name", 0, {"name": title})
        self._meta("process_sort_index", 0, {"sort_index": process})

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def name_thread(self, thread: int, name: str) -> None:
        """Names a row of the picture; rows are sorted by number."""
        self._meta("thread_name", thread, {"name": name})
        self._meta("thread_sort_index", thread, {"sort_index": thread})

    def label(self, text: str) -> None:
        """A word beside the process's name: what a reader must know of its events."""
        self._meta("process_labels", 0, {"labels": text})

    def span(self, category: str, name: str, thread: int, begin: int, end: int, args: str = "{}") -> None:
        """Something that took from `begin` to `end`, in ns; `args` is a JSON object."""
        quoted = self._quoted.get(name)
        if quoted is None:
            quoted = self._quoted[name] = json.dumps(name)
        self._line(
            f'{{"ph":"X","cat":"{category}","name":{quoted},"pid":{self.process},"tid":{thread},'
            f'"ts":{begin / 1e3:.3f},"dur":{(end - begin) / 1e3:.3f},"args":{args}}}'
        )

    def step(self, step_id: int, begin: int, end: int, num_tokens: int) -> None:
        """One step of the process's device."""
        args = f'{{"step_id":{step_id},"num_tokens":{num_tokens}}}'
        self.span(STEP, f"step {step_id}", STEPS_THREAD, begin, end, args)

    def event(self, fields: Mapping[str, Any]) -> None:
        """An event made elsewhere, whose process becomes this one."""
        self._line(json.dumps({**fields, "pid": self.process}, separators=(",", ":")))

    def _meta(self, name: str, thread: int, args: Mapping[str, Any]) -> None:
        self.event({"ph": "M", "name": name, "tid": thread, "args": args})

    def _line(self, text: str) -> None:
        self._file.write(text if self._first else _SEPARATOR + text)
        self._first = False


def merge_parts(path: Path | str, parts: Sequence[Path | str]) -> None:
    """One trace (gzip, JSON) of the parts, which are kept. Raises OSError, and then leaves no file."""
    target = Path(path)
    try:
        with gzip.open(target, "wb", compresslevel=_COMPRESSION) as file:
            file.write(HEAD.encode())
            for number, part in enumerate(parts):
                if number:
                    file.write(_SEPARATOR.encode())
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, file)
            file.write(TAIL.encode())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
