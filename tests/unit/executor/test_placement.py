"""Which processors and devices ranks get."""

from __future__ import annotations

import logging

import pytest

from evensong.executor import placement
from evensong.executor.placement import Place, on_devices, on_processors, place_ranks, visible_devices
from evensong.protocol.errors import ConfigError
from evensong.utils import machine


def cores(places: list[Place]) -> list[tuple[int, ...] | None]:
    return [place.processors for place in places]


def test_processors_are_divided_between_the_ranks() -> None:
    assert cores(on_processors([0, 1], 2, 2)) == [(0,), (1,)]
    assert cores(on_processors([0, 1, 4, 5, 9], 5, 2)) == [(0, 1, 4), (5, 9)]
    assert cores(on_processors(range(8), 8, 3)) == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert cores(on_processors(range(4), 4, 1)) == [(0, 1, 2, 3)]
    assert [dict(place.variables) for place in on_processors(range(3), 3, 2)] == [
        {"OMP_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "1"},
    ]


def test_a_quota_and_the_users_number_of_threads_are_kept() -> None:
    assert cores(on_processors(range(16), 4, 2)) == [(0, 1), (8, 9)]
    assert cores(on_processors(range(8), 8, 2, "2")) == [(0, 1), (4, 5)]
    assert cores(on_processors(range(8), 8, 2, "100")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cores(on_processors(range(2), 2, 1, "many")) == [(0, 1)]


def test_more_ranks_than_processors_share_them_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="evensong.executor.placement"):
        places = on_processors([0, 1], 2, 3)
    assert places == [Place(None, {"OMP_NUM_THREADS": "1"})] * 3
    assert [record.message for record in caplog.records] == [
        "3 ranks share 2 processors: each step takes longer than with fewer ranks"
    ]
    assert cores(on_processors(range(8), 1, 2)) == [None, None], "a quota of one processor"


def test_each_rank_sees_its_own_device() -> None:
    assert [dict(place.variables) for place in on_devices(["0", "1", "2"], 2)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    with pytest.raises(ConfigError, match="3 ranks need 3 devices; there are 2"):
        on_devices(["0", "1"], 3)


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, ["0", "1", "2", "3"]),
        ("3,1", ["3", "1"]),
        (" 2 , 0", ["2", "0"]),
        ("", []),
        ("1,-1,2", ["1"]),
        ("0,4,1", ["0"]),
        ("GPU-8932f937,MIG-1", ["GPU-8932f937", "MIG-1"]),
    ],
)
def test_a_list_in_the_environment_is_honoured(setting: str | None, visible: list[str]) -> None:
    assert visible_devices(setting, 4) == visible


def test_places_on_a_host_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER_FILES", ("/dev/null",))
    monkeypatch.setattr(placement, "count_devices", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [place.variables["CUDA_VISIBLE_DEVICES"] for place in place_ranks("auto", 2)] == ["3", "1"]
    with pytest.raises(ConfigError, match="3 ranks need 3 devices; there are 2"):
        place_ranks("cuda", 3)
    assert place_ranks("cpu", 1)[0].processors
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert place_ranks("auto", 1)[0].processors, "none can be seen: the CPU"
    with pytest.raises(ConfigError, match="there are 0"):
        place_ranks("cuda", 1)


def test_devices_are_counted_without_torch() -> None:
    assert placement.count_devices() >= 0
