"""A rank's part of a trace from torch's profiler, whose times are brought to the monotonic clock of the other ranks."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from evensong.observe.chrome_trace import STEPS_THREAD, PartWriter

# Torch keeps every event in memory, some thousands a step, until it is asked for them.
MOST_STEPS = 256
_CHUNK = 1 << 20
_FLOWS = ("s", "t", "f")
_BETWEEN = " \t\r\n,"
_OPENING = '"traceEvents": ['
# The zero of the file's times, in ns.
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')


class TorchTrace:
    """Does nothing until `start`."""

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._listens = False
        # Of each step: id, begin and end in ns, tokens.
        self._steps: list[list[int]] = []
        # Torch's times are those of the wall clock.
        self._clock_offset = 0

    def start(self, kind: str) -> None:
        """Begins; `kind` is the type of the torch device."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler, self._listens, self._steps = torch.profiler.profile(activities=activities), True, []
        self._clock_offset = time.time_ns() - time.monotonic_ns()
        self._profiler.start()

    def step_begins(self, step_id: int, num_tokens: int) -> None:
        """A forward pass is about to start; a probe, whose id is -1, is no step."""
        if not self._listens or step_id < 0:
            return
        if len(self._steps) == MOST_STEPS:
            self._end_listening()
            return
        now = time.monotonic_ns()
        self._steps.append([step_id, now, now, num_tokens])

    def step_ends(self) -> None:
        """The step that began last has its logits."""
        if self._listens and self._steps:
            self._steps[-1][2] = time.monotonic_ns()

    def stop(self, writer: PartWriter) -> None:
        """Ends and writes. Raises OSError."""
        assert self._profiler is not None, "stop without start"
        if self._listens:
            self._end_listening()
        else:
            writer.label(f"cut off after {MOST_STEPS} steps")
        profiler, self._profiler = self._profiler, None
        writer.name_thread(STEPS_THREAD, "steps")
        for step_id, begin, end, num_tokens in self._steps:
            writer.step(step_id, begin, end, num_tokens)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "torch.json"
            profiler.export_chrome_trace(str(path))
            write_torch_events(writer, path, self._clock_offset)

    def _end_listening(self) -> None:
        assert self._profiler is not None
        self._listens = False
        self._profiler.stop()


def write_torch_events(writer: PartWriter, path: Path, clock_offset: int) -> None:
    """Torch's events of a Chrome trace that it wrote, as events of the writer's process.

    Each of its threads and streams gets a row; `clock_offset`: the wall clock less the monotonic clock, in ns.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read(_CHUNK)
        while _OPENING not in text and (more := file.read(_CHUNK)):
            text += more
        head, _, text = text.partition(_OPENING)
        base = _BASE.search(head) or _BASE.search(_tail(path))
        shift = ((int(base[1]) if base else 0) - clock_offset) / 1e3
        rows: dict[tuple[Any, Any], int] = {}
        for event in _events(file, text):
            place = event.get("pid"), event.get("tid")
            if event.get("ph") not in ("X", *_FLOWS) or not isinstance(place[0], int):
                continue
            if place not in rows:
                rows[place] = STEPS_THREAD + 1 + len(rows)
                on_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
                kind = f"device {place[0]} stream" if on_device else "torch thread"
                writer.name_thread(rows[place], f"{kind} {place[1]}")
            event |= {"tid": rows[place], "ts": round(event["ts"] + shift, 3)}
            if event["ph"] in _FLOWS:
                event["id"] = f"{writer.process}:{event.get('id')}"
            writer.event(event)


def _tail(path: Path) -> str:
    """The last kilobyte of a file: what torch writes behind its events."""
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - 1024, 0))
        return file.read().decode("utf-8", "replace")


def _events(file: IO[str], text: str) -> Iterator[dict[str, Any]]:
    """The objects of a list, of which `text` follows its opening bracket, one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        while text[at : at + 1] in _BETWEEN and at < len(text):
            at += 1
        if text[at : at + 1] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:
            more = file.read(_CHUNK)
            if not more:
                return
            text, at = text[at:] + more, 0
            continue
        yield event
