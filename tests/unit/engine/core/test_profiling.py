"""All ranks' parts become one trace, and whatever fails leaves nothing that runs or lies about."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from evensong.engine.core import profiling
from evensong.engine.core.profiling import Profiling
from evensong.executor.base import Executor
from evensong.observe.trace_figures import ranks_of, read_trace
from evensong.protocol.errors import RequestError
from evensong.testing.fake_executor import FakeExecutor
from evensong.worker.device import Device
from evensong.worker.profiler import Profiler
from tests.unit.engine.core.making import ask, make_core
from tests.unit.worker.test_profiler import Traced


class Ranks:
    """Profilers of made-up ranks, called as an executor calls workers: all of them, then the first error."""

    def __init__(self, folder: Path | None, num_ranks: int) -> None:
        self.devices = [Traced() for _ in range(num_ranks)]
        path = None if folder is None else str(folder)
        self._profilers = [Profiler(path, cast(Device, device), r) for r, device in enumerate(self.devices)]
        self.broken = ""

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "profile"
        results, failures = [], []
        for rank, profiler in enumerate(self._profilers):
            try:
                if args[0] == self.broken and rank:
                    raise RequestError(f"rank {rank} is broken")
                results.append(profiler.act(*args))
            except RequestError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return results


class Profiled(FakeExecutor):
    """Scripted tokens, and ranks that can be profiled."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._ranks.collective_rpc(method, timeout, args)


def make(folder: Path | None, num_ranks: int = 3) -> tuple[Profiling, Ranks]:
    """One whose core never steps."""

    class Still:
        """Looked at, never called."""

        schedule = update_from_output = execute_model = None

    ranks, still = Ranks(folder, num_ranks), Still()
    still.collective_rpc = ranks.collective_rpc  # type: ignore[attr-defined]
    return Profiling(cast(Executor, still), cast(Any, Still())), ranks


def test_one_trace_of_all_ranks(tmp_path: Path) -> None:
    profiling, ranks = make(tmp_path)
    profiling.start("mine")
    assert all(device.on for device in ranks.devices)
    (trace,) = profiling.stop()
    assert [path.name for path in tmp_path.iterdir()] == [Path(trace).name]
    assert Path(trace).name.startswith("mine.") and trace.endswith(".pt.trace.json.gz")
    processes = read_trace(trace)
    assert [process.title for process in processes] == ["core-0", "worker-0.0", "worker-0.1", "worker-0.2"]
    assert all(len(rank.ops) == 1 for rank in ranks_of(processes))
    profiling.start(None)
    assert len(profiling.stop()) == 1 and len(list(tmp_path.iterdir())) == 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--torch-profiler-dir"):
        make(None)[0].start(None)
    profiling, ranks = make(tmp_path)
    with pytest.raises(RequestError, match="does not run"):
        profiling.stop()
    profiling.start(None)
    with pytest.raises(RequestError, match="runs already"):
        profiling.start(None)
    assert all(device.on for device in ranks.devices), "the one that runs goes on"


@pytest.mark.parametrize("verb", ["start", "stop"])
def test_a_rank_that_cannot_ends_it_for_all(tmp_path: Path, verb: str) -> None:
    profiling, ranks = make(tmp_path)
    ranks.broken = verb
    with pytest.raises(RequestError, match="rank 1 is broken"):
        profiling.start(None)
        profiling.stop()
    assert not any(device.on for device in ranks.devices) and not list(tmp_path.iterdir())
    ranks.broken = ""
    profiling.start(None)
    assert len(ranks_of(read_trace(profiling.stop()[0]))) == 3


def test_a_trace_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, ranks = make(tmp_path)
    instance.start(None)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling, "merge_parts", full)
    with pytest.raises(RequestError, match="cannot be written.*No space"):
        instance.stop()
    assert not list(tmp_path.iterdir()) and not any(device.on for device in ranks.devices)


def test_the_cores_own_spans_are_a_rank_of_their_own(tmp_path: Path) -> None:
    core = make_core(Profiled(Ranks(tmp_path, 1)))
    try:
        instance = Profiling(core.executor, core.scheduler)
        instance.start(None)
        core.add_request(ask("a", [1, 2, 3], max_tokens=3))
        while core.scheduler.has_requests():
            core.step()
        (trace,) = instance.stop()
        before = vars(core.scheduler), vars(core.executor)
        assert not any(name in own for own in before for name in ("schedule", "execute_model", "update_from_output"))
    finally:
        core.shutdown()
    own = read_trace(trace)[0].own
    assert set(own.names) == {"schedule", "execute", "update"}
    for name in own.names:
        tokens = own.num_tokens[own.kinds == own.names.index(name)]
        assert tokens.sum() == 3 + 2, "a prompt of three, and two tokens"
    assert (own.ends >= own.begins).all() and (own.step_ids > 0).all()


def test_the_cores_spans_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST_SPANS", 4)
    core = make_core(Profiled(Ranks(tmp_path, 1)))
    try:
        instance = Profiling(core.executor, core.scheduler)
        instance.start(None)
        core.add_request(ask("a", max_tokens=9))
        while core.scheduler.has_requests():
            core.step()
        process = read_trace(instance.stop()[0])[0]
    finally:
        core.shutdown()
    assert len(process.own) == 4 and process.notes == ["spans cut off: the profile took too long"]
