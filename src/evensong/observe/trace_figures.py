"""What a trace says: how busy each rank was, how long it rested between steps, which ops took the time.

A rank's busy time is the union of its op spans: what its threads compute, not what they wait for. It is taken in the
steady state: the first and the last steps, while requests arrive and end, are cut off.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evensong.observe.chrome_trace import CORE, CORE_PROCESS, OP, STEP

Int64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Torch's names of what runs on a device, and of what prepares it on the host.
_ON_DEVICE, _ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), "cpu_op"
TOP_OPS = 10
# Of the steps, at each end.
CUT_SHARE, CUT_LEAST = 0.1, 1


class TraceError(ValueError):
    """A file that is no trace of evensong's."""


class _Event(msgspec.Struct, gc=False):
    """An event of the file; times in us."""

    ph: str
    pid: int = 0
    tid: int | str = 0
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


@dataclass
class Spans:
    """Spans of one kind, in order of begin: times in ns, `kinds` as indices of `names`."""

    names: list[str] = field(default_factory=list)
    kinds: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    threads: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    begins: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    ends: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    step_ids: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    num_tokens: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.begins)


@dataclass
class Process:
    """One process of a trace. `ops` run on its device (or its host, where there is no other); `own` is the core's."""

    number: int
    title: str
    ops: Spans
    steps: Spans
    own: Spans
    notes: list[str] = field(default_factory=list)


class _Collected:
    """Spans while they are read, in little memory."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._flat = array("q")

    def add(self, event: _Event) -> None:
        """One more."""
        number = self._numbers.setdefault(event.name, len(self._numbers))
        begin, args = round(event.ts * 1e3), event.args
        thread = event.tid if isinstance(event.tid, int) else 0
        end = begin + round(event.dur * 1e3)
        self._flat.extend((number, thread, begin, end, args.get("step_id", -1), args.get("num_tokens", 0)))

    def __len__(self) -> int:
        return len(self._flat)

    def spans(self) -> Spans:
        """All of them."""
        table = np.array(self._flat, dtype=np.int64).reshape(-1, 6)
        # Of two that begin together the outer one comes first.
        ordered = table[np.lexsort((-table[:, 3], table[:, 2]))]
        return Spans(list(self._numbers), *ordered.T)


def read_trace(path: Path | str) -> list[Process]:
    """The processes of a trace that evensong wrote, in order. Raises TraceError, or OSError."""
    titles: dict[int, str] = {}
    notes: dict[int, list[str]] = defaultdict(list)
    kept: dict[tuple[int, str], _Collected] = defaultdict(_Collected)
    for event in _events(Path(path)):
        if event.ph == "M" and event.name == "process_name":
            titles[event.pid] = str(event.args.get("name"))
        elif event.ph == "M" and event.name == "process_labels":
            notes[event.pid].append(str(event.args.get("labels")))
        elif event.ph == "X":
            category = "device" if event.cat in _ON_DEVICE else event.cat
            kept[event.pid, category].add(event)
    if not titles:
        raise TraceError(f"{path} holds no trace")

    def spans(number: int, *categories: str) -> Spans:
        return next((kept[number, c].spans() for c in categories if kept[number, c]), Spans())

    return [
        Process(n, titles[n], spans(n, OP, "device", _ON_HOST), spans(n, STEP), spans(n, CORE), notes[n])
        for n in sorted(titles)
    ]


def ranks_of(processes: Sequence[Process]) -> list[Process]:
    """The processes that are ranks."""
    return [process for process in processes if process.number != CORE_PROCESS]


def _events(path: Path) -> Iterator[_Event]:
    decoder = msgspec.json.Decoder(_Event)
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                text = line.strip().rstrip(b",")
                if text.startswith(b'{"ph"') or (text.startswith(b"{") and text.endswith(b"}")):
                    yield decoder.decode(text)
    except (msgspec.MsgspecError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} holds no trace: {error}") from error


def steady_window(process: Process) -> tuple[int, int] | None:
    """Begin and end in ns of a rank's steady state; None where it has too few steps."""
    cut = max(CUT_LEAST, round(len(process.steps) * CUT_SHARE))
    if len(process.steps) <= 2 * cut or not len(process.ops):
        return None
    first, stop = process.steps.begins[cut], process.steps.begins[-cut]
    # From op to op: a stage's step begins with waiting for the stage before it, and that belongs to the step before.
    begin, end = (int(process.ops.begins[np.searchsorted(process.ops.begins, at)]) for at in (first, stop))
    return (begin, end) if begin < end else None


def busy_ns(ops: Spans, begin: int, end: int) -> int:
    """The union of spans between two times."""
    starts, ends = np.clip(ops.begins, begin, end), np.clip(ops.ends, begin, end)
    if not len(starts):
        return 0
    # What the spans before each one cover already ends at `reached`.
    reached = np.concatenate(([begin], np.maximum.accumulate(ends)[:-1]))
    return int(np.maximum(ends - np.maximum(starts, reached), 0).sum())


def gaps_ns(process: Process, begin: int, end: int) -> Int64:
    """Time without an op around each begin of a step between two times: from one step's last op to the next's first."""
    ops = process.ops
    reached = np.maximum.accumulate(ops.ends)
    starts = process.steps.begins
    next_op = np.searchsorted(ops.begins, starts[(starts > begin) & (starts <= end)])
    next_op = next_op[(next_op > 0) & (next_op < len(ops))]
    gaps: Int64 = np.maximum(ops.begins[next_op] - reached[next_op - 1], 0)
    return gaps


def figures_of(processes: Sequence[Process]) -> dict[str, Any]:
    """The figures of all ranks and of the core, for JSON. Those of a rank without a steady state are None."""
    core = next((process.own for process in processes if process.number == CORE_PROCESS), Spans())
    return {
        "ranks": [_rank_figures(process) for process in ranks_of(processes)],
        "core_us": {
            name: _spread((core.ends - core.begins)[core.kinds == number] / 1e3)
            for number, name in enumerate(core.names)
        },
    }


def _rank_figures(process: Process) -> dict[str, Any]:
    figures: dict[str, Any] = {"name": process.title, "num_steps": len(process.steps), "notes": process.notes}
    window = steady_window(process)
    if window is None:
        return figures | {"window_ms": None, "busy": None, "idle": None, "gap_us": None, "step_ms": None, "ops": []}
    begin, end = window
    busy = busy_ns(process.ops, begin, end) / (end - begin)
    return figures | {
        "window_ms": round((end - begin) / 1e6, 3),
        "busy": round(busy, 4),
        "idle": round(1 - busy, 4),
        "gap_us": _spread(gaps_ns(process, begin, end) / 1e3),
        "step_ms": _spread(_step_times(process, begin, end) / 1e6),
        "ops": _op_times(process.ops, begin, end),
    }


def _step_times(process: Process, begin: int, end: int) -> Int64:
    """From the first op to the last of each step between two times."""
    ops, steps = process.ops, process.steps
    first = np.searchsorted(ops.begins, steps.begins)
    stop = np.append(first[1:], len(ops))
    reached = np.maximum.accumulate(ops.ends)
    inside = (steps.begins >= begin) & (steps.begins < end) & (first < stop)
    # A step that is under way already has begun before its first op.
    inside |= (first < stop) & (ops.begins[np.minimum(first, len(ops) - 1)] == begin)
    times: Int64 = reached[stop[inside] - 1] - ops.begins[first[inside]]
    return times


def _op_times(ops: Spans, begin: int, end: int) -> list[dict[str, Any]]:
    """Thread time by op between two times, longest first; of ops within others only the outer ones count."""
    times = np.clip(ops.ends, begin, end) - np.clip(ops.begins, begin, end)
    for thread in np.unique(ops.threads):
        own = np.flatnonzero(ops.threads == thread)
        reached = np.maximum.accumulate(ops.ends[own])
        times[own[1:][ops.ends[own[1:]] <= reached[:-1]]] = 0
    sums = np.bincount(ops.kinds, weights=times, minlength=len(ops.names))
    total = float(sums.sum()) or 1.0
    order = np.argsort(-sums, kind="stable")[:TOP_OPS]
    return [
        {"name": ops.names[i], "ms": round(float(sums[i]) / 1e6, 3), "share": round(float(sums[i]) / total, 4)}
        for i in order
        if sums[i] > 0
    ]


def _spread(values: Any) -> Mapping[str, float] | None:
    if not len(values):
        return None
    found = {"median": np.median(values), "p90": np.percentile(values, 90), "max": np.max(values)}
    return {name: round(float(value), 3) for name, value in found.items()}


def table_of(figures: Mapping[str, Any]) -> str:
    """The figures for people: a line for each rank, then its ops."""
    head = f"{'rank':<12}{'steps':>7}{'busy':>8}{'idle between steps us: median':>31}{'p90':>9}{'max':>10}"
    lines = [head + f"{'step ms: median':>17}{'p90':>9}{'max':>9}"]
    for rank in figures["ranks"]:
        if rank["busy"] is None:
            lines.append(f"{rank['name']:<12}{rank['num_steps']:>7}   too few steps for a steady state")
            continue
        gap, step = rank["gap_us"], rank["step_ms"]
        times = f"{_at(gap, 'median', 31)}{_at(gap, 'p90', 9)}{_at(gap, 'max', 10)}"
        times += f"{_at(step, 'median', 17)}{_at(step, 'p90', 9)}{_at(step, 'max', 9)}"
        lines.append(f"{rank['name']:<12}{rank['num_steps']:>7}{rank['busy']:>8.1%}{times}")
    lines += [f"{rank['name']}: {note}" for rank in figures["ranks"] for note in rank["notes"]]
    for rank in figures["ranks"]:
        if rank["ops"]:
            lines += ["", f"{rank['name']}: thread time by op"]
            lines += [f"  {op['name']:<40.40}{op['ms']:>12.2f} ms{op['share']:>8.1%}" for op in rank["ops"]]
    if figures["core_us"]:
        lines += ["", f"{'core, us a step':<24}{'median':>10}{'p90':>10}{'max':>10}"]
        for name, spread in figures["core_us"].items():
            lines.append(f"  {name:<22}{_at(spread, 'median', 10)}{_at(spread, 'p90', 10)}{_at(spread, 'max', 10)}")
    return "\n".join(lines)


def _at(spread: Mapping[str, float] | None, name: str, width: int) -> str:
    return f"{'-':>{width}}" if spread is None else f"{spread[name]:>{width}.2f}"
