"""A rank's part of a trace, from what the native engine noted of its threads and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evensong.observe.chrome_trace import OP, STEPS_THREAD, PartWriter

Int64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Between two units of one op a thread does nothing but take the next one. More is a wait, and stays visible.
SAME_OP_NS = 5_000
# Units that are joined at once, for their copies are several times as large as they are. An op may be cut there.
AT_ONCE = 1 << 18
# What the engine keeps (kMostSpans of native/src/engine.cpp).
MOST_SPANS = 4_000_000
# What segment -1 stands for: copies that come before a step's own segments.
COPIES = "copy_blocks"
_SEGMENT, _THREAD, _BEGIN, _END = range(4)


def join_units(spans: Int64) -> Int64:
    """`spans` [num_units, 4] (segment, thread, begin and end in ns) as [num_ops, 5]: an op of a thread in one piece.

    The last column is its number of units. A thread that waited between two units has two pieces. In order of thread
    and begin.
    """
    if not len(spans):
        return np.zeros((0, 5), dtype=np.int64)
    ordered = spans[np.lexsort((spans[:, _BEGIN], spans[:, _THREAD]))]
    before, after = ordered[:-1], ordered[1:]
    parted = (before[:, :_BEGIN] != after[:, :_BEGIN]).any(axis=1) | (after[:, _BEGIN] - before[:, _END] > SAME_OP_NS)
    first = np.concatenate(([0], np.flatnonzero(parted) + 1))
    last = np.concatenate((first[1:], [len(ordered)])) - 1
    columns = (ordered[first, :_END], ordered[last, _END:], (last - first + 1)[:, None])
    return np.concatenate(columns, axis=1)


def join_steps(steps: Int64) -> Int64:
    """`steps` [n, 4] (id, begin and end in ns, rows), those that ran in several parts in one piece each.

    What has no id (-1: probes, scores of prompts) is left out, unless nothing has one: then they are numbered.
    """
    if not len(steps):
        return steps.reshape(-1, 4)
    if (steps[:, 0] < 0).all():
        return np.concatenate((np.arange(len(steps))[:, None], steps[:, 1:]), axis=1)
    named = steps[steps[:, 0] >= 0]
    first = np.concatenate(([0], np.flatnonzero(np.diff(named[:, 0])) + 1))
    last = np.concatenate((first[1:], [len(named)])) - 1
    rows = np.maximum.reduceat(named[:, 3], first)
    return np.stack((named[first, 0], named[first, 1], named[last, 2], rows), axis=1)


def write_native_trace(writer: PartWriter, names: Sequence[str], spans: Any, steps: Any) -> None:
    """`names` of the segments; `spans` as in `join_units`; `steps` [n, 4]: id, begin and end in ns, rows."""
    writer.name_thread(STEPS_THREAD, "steps")
    for thread in np.unique(spans[:, _THREAD]).tolist():
        writer.name_thread(_row(thread), f"thread {thread}")
    if len(spans) >= MOST_SPANS:
        writer.label("ops cut off: the profile took too long")
    for step_id, begin, end, num_rows in join_steps(steps).tolist():
        writer.step(step_id, begin, end, num_rows)
    for first in range(0, len(spans), AT_ONCE):
        for segment, thread, begin, end, units in join_units(spans[first : first + AT_ONCE]).tolist():
            name = names[segment] if segment >= 0 else COPIES
            writer.span(OP, name, _row(thread), begin, end, f'{{"segment":{segment},"units":{units}}}')


def _row(thread: int) -> int:
    return STEPS_THREAD + 1 + thread
