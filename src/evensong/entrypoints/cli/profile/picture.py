"""A trace as a picture: ranks as rows, their steps in the colour of their batch, some tens of milliseconds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evensong.observe.chrome_trace import CORE_PROCESS
from evensong.observe.trace_figures import Process, Spans, ranks_of, steady_window
from evensong.protocol.errors import ConfigError

DEFAULT_MS, LEAST_STEPS = 40.0, 4
COLOURS = ("#2f6db5", "#e08a1e", "#3b9b57", "#b5413b", "#7a58a8", "#5d6b78")
CORE_COLOURS = {"schedule": "#5d6b78", "execute": "#9aa5b1", "update": "#2b333b"}
# Rests shorter than a pixel of the widest picture are not drawn: a row of ops would be a grey blur.
LEAST_REST_SHARE = 1 / 2500


def draw(path: Path, processes: Sequence[Process], figures: Mapping[str, Any], milliseconds: float | None) -> None:
    """Writes the picture, in the format that the file's name asks for.

    Raises ConfigError for a trace that holds no steady state, and where the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    ranks = ranks_of(processes)
    begin, end = window_of(ranks, milliseconds)
    core = next((process.own for process in processes if process.number == CORE_PROCESS), Spans())
    figure = Figure(figsize=(14, 1.6 + 0.9 * (len(ranks) + bool(len(core)))), layout="constrained", dpi=120)
    axes = figure.subplots()
    labels = []
    for row, rank in enumerate(ranks):
        _draw_rank(axes, row, rank, begin, end, num_colours(len(ranks)))
        labels.append(f"{rank.title}\nbusy {figures['ranks'][row]['busy']:.1%}")
    if len(core):
        _draw_core(axes, len(ranks), core, begin, end)
        labels.append("core")
    axes.set(xlim=(0, (end - begin) / 1e6), ylim=(len(labels) - 0.4, -0.6), xlabel="ms")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_title("steps by rank: full colour while its ops run, pale while it waits within a step", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--png: {path} cannot be written: {error}") from error


def num_colours(num_ranks: int) -> int:
    """Batches take turns on the stages, so as many colours as stages tell them apart; at least two."""
    return min(max(num_ranks, 2), len(COLOURS))


def window_of(ranks: Sequence[Process], milliseconds: float | None) -> tuple[int, int]:
    """Begin and end in ns of what is drawn: the middle of the time in which all ranks are in their steady state."""
    windows = [steady_window(rank) for rank in ranks]
    found = [window for window in windows if window is not None]
    if not ranks or len(found) < len(ranks):
        raise ConfigError("--png: the trace has too few steps for a picture of its steady state")
    begin, end = max(window[0] for window in found), min(window[1] for window in found)
    if milliseconds is None:
        step = max(float(np.median(np.diff(rank.steps.begins))) for rank in ranks)
        milliseconds = max(DEFAULT_MS, LEAST_STEPS * step / 1e6)
    width = round(milliseconds * 1e6)
    if end - begin > width:
        begin += (end - begin - width) // 2
        end = begin + width
    return begin, end


def joined(ops: Spans, begin: int, end: int, least_rest: float) -> list[tuple[int, int]]:
    """The union of spans between two times, as begin and end; rests shorter than `least_rest` ns are closed."""
    pieces: list[tuple[int, int]] = []
    for first, last in zip(ops.begins.tolist(), ops.ends.tolist(), strict=True):
        first, last = max(first, begin), min(last, end)
        if first >= last:
            continue
        if pieces and first - pieces[-1][1] <= least_rest:
            pieces[-1] = pieces[-1][0], max(pieces[-1][1], last)
        else:
            pieces.append((first, last))
    return pieces


def _draw_rank(axes: Any, row: int, rank: Process, begin: int, end: int, colours: int) -> None:
    """Each step from its first op to the next one's, and what runs in it."""
    steps, ops = rank.steps, rank.ops
    stops = [*steps.begins[1:].tolist(), int(ops.ends.max())]
    first_ops = np.searchsorted(ops.begins, steps.begins)
    for index, step_id in enumerate(steps.step_ids.tolist()):
        low, high = first_ops[index], np.searchsorted(ops.begins, stops[index])
        if low >= high or ops.begins[low] >= end or stops[index] <= begin:
            continue
        own = Spans(ops.names, *(column[low:high] for column in (ops.kinds, ops.threads, ops.begins, ops.ends)))
        pieces = joined(own, begin, end, (end - begin) * LEAST_REST_SHARE)
        if not pieces:
            continue
        colour = COLOURS[max(step_id, 0) % colours]
        left, right = pieces[0][0], pieces[-1][1]
        axes.broken_barh([_ms(left, right, begin)], (row - 0.32, 0.64), facecolors=colour, alpha=0.25)
        axes.broken_barh([_ms(*piece, begin) for piece in pieces], (row - 0.32, 0.64), facecolors=colour)
        if right - left > (end - begin) / 40:
            middle = ((left + right) / 2 - begin) / 1e6
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
            axes.text(middle, row, str(step_id), ha="center", va="center", fontsize=9, bbox=box)


def _draw_core(axes: Any, row: int, core: Spans, begin: int, end: int) -> None:
    for number, name in enumerate(core.names):
        inside = (core.kinds == number) & (core.ends > begin) & (core.begins < end)
        bars = [
            _ms(max(b, begin), min(e, end), begin) for b, e in zip(core.begins[inside], core.ends[inside], strict=True)
        ]
        axes.broken_barh(bars, (row - 0.2, 0.4), facecolors=CORE_COLOURS.get(name, "#5d6b78"), label=name)
    axes.legend(loc="lower right", ncols=3, fontsize=8, frameon=False, bbox_to_anchor=(1, 1))


def _ms(begin: int, end: int, origin: int) -> tuple[float, float]:
    return (begin - origin) / 1e6, (end - begin) / 1e6
