"""The picture of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from evensong.entrypoints.cli.profile.picture import draw, joined, num_colours, window_of
from evensong.observe.trace_figures import figures_of, ranks_of, read_trace
from evensong.protocol.errors import ConfigError
from tests.unit.observe.test_trace_figures import US, make_trace


def test_the_middle_of_what_all_ranks_share_is_drawn(tmp_path: Path) -> None:
    ranks = ranks_of(read_trace(make_trace(tmp_path)))
    # The second rank's steps are 50 us later than the first one's.
    assert window_of(ranks, None) == (150 * US, 900 * US)
    assert window_of(ranks, 0.1) == (475 * US, 575 * US)


def test_rests_that_nobody_could_see_are_closed(tmp_path: Path) -> None:
    (rank, _) = ranks_of(read_trace(make_trace(tmp_path)))
    assert joined(rank.ops, 110 * US, 290 * US, 0) == [(110 * US, 180 * US), (200 * US, 280 * US)]
    assert joined(rank.ops, 110 * US, 290 * US, 20 * US) == [(110 * US, 280 * US)]


def test_batches_have_colours() -> None:
    assert [num_colours(ranks) for ranks in (1, 2, 3, 100)] == [2, 2, 3, 6]


@pytest.mark.parametrize(("name", "begins"), [("t.png", b"\x89PNG"), ("new/t.svg", b"<?xml")])
def test_it_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    processes = read_trace(make_trace(tmp_path, num_ranks=3))
    draw(tmp_path / name, processes, figures_of(processes), None)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_every_rank_and_step_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.rcParams", {**__import__("matplotlib").rcParams, "svg.fonttype": "none"})
    processes = read_trace(make_trace(tmp_path))
    draw(tmp_path / "t.svg", processes, figures_of(processes), 0.5)
    text = (tmp_path / "t.svg").read_text()
    for words in ("worker-0.0", "worker-0.1", "busy 80.0%", "core", "schedule", ">45<"):
        assert words in text


def test_places_and_traces_that_will_not_do(tmp_path: Path) -> None:
    processes = read_trace(make_trace(tmp_path))
    figures = figures_of(processes)
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "t.png", tmp_path / "t.nothing", tmp_path):
        with pytest.raises(ConfigError, match="--png"):
            draw(bad, processes, figures, None)
    with pytest.raises(ConfigError, match="too few steps"):
        draw(tmp_path / "t.png", processes[:1], figures, None)
