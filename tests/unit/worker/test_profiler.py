"""One rank's profiler: when it may start and stop, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from evensong.observe.chrome_trace import PartWriter
from evensong.protocol.errors import ConfigError, RequestError
from evensong.worker.device import Device
from evensong.worker.profiler import Profiler


class Traced:
    """A device that has one op to tell of."""

    def __init__(self) -> None:
        self.on = False
        self.failure: OSError | None = None

    def start_trace(self) -> Callable[[PartWriter], None]:
        self.on = True
        return self._stop

    def _stop(self, writer: PartWriter) -> None:
        self.on = False
        if self.failure is not None:
            raise self.failure
        writer.span("op", "linear", 1, 1000, 2000)


def make(folder: Path | None, rank: int = 0) -> tuple[Profiler, Traced]:
    device = Traced()
    return Profiler(None if folder is None else str(folder), cast(Device, device), rank), device


def test_it_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--torch-profiler-dir"):
        make(None)[0].start()
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--torch-profiler-dir"):
            make(bad)


def test_a_folder_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *args: False)
    with pytest.raises(ConfigError, match="cannot be written to"):
        make(tmp_path)


def test_a_part_has_the_ranks_number(tmp_path: Path) -> None:
    profiler, device = make(tmp_path / "new", rank=3)
    part = Path(profiler.start("mine"))
    assert device.on and part.parent == tmp_path / "new"
    assert part.name.startswith("mine.") and part.name.endswith(".rank3.part")
    profiler.stop()
    events: list[dict[str, Any]] = json.loads(f"[{part.read_text()}]")
    assert {event["pid"] for event in events} == {4} and events[0]["args"] == {"name": "worker-0.3"}
    assert not device.on


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    profiler, device = make(tmp_path)
    for prefix in ("../up", "", ".hidden", "a" * 65):
        with pytest.raises(RequestError, match="plain name"):
            profiler.start(prefix)
    with pytest.raises(RequestError, match="does not run"):
        profiler.stop()
    assert not device.on
    profiler.start()
    with pytest.raises(RequestError, match="runs already"):
        profiler.start()


def test_a_part_that_cannot_be_written_is_not_left(tmp_path: Path) -> None:
    profiler, device = make(tmp_path)
    profiler.start()
    device.failure = OSError(28, "No space left on device")
    with pytest.raises(RequestError, match="cannot be written.*No space"):
        profiler.stop()
    assert not list(tmp_path.iterdir())
    device.failure = None
    Path(profiler.start())
    profiler.stop()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    profiler, device = make(tmp_path)
    profiler.drop()
    profiler.start()
    profiler.drop()
    assert not device.on and not list(tmp_path.iterdir())
    profiler.start()
