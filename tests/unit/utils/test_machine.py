"""Processors and memory under a container's limits."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from evensong.utils import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that stand for both cgroup versions; empty at first."""
    monkeypatch.setattr(machine, "_CGROUP_V2", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP_V1", tmp_path / "v1")
    (tmp_path / "v1").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 8), ("150000 100000", 2), ("20000 100000", 1), ("9900000 100000", 8), ("x", 8)]
)
def test_processors(cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (cgroup / "cpu.max").write_text(quota)
    assert machine.usable_cpus() == cpus


def test_memory_without_a_container_is_the_machines(cgroup: Path) -> None:
    total = psutil.virtual_memory().total
    assert machine.memory_limit_bytes() == total and 0 < machine.available_memory_bytes() <= total
    (cgroup / "memory.max").write_text("max\n")
    assert machine.memory_limit_bytes() == total


@pytest.mark.parametrize(("folder", "limit", "used"), [
    (".", "memory.max", "memory.current"), ("v1", "memory.limit_in_bytes", "memory.usage_in_bytes")
])  # fmt: skip
def test_a_containers_limit_counts(cgroup: Path, folder: str, limit: str, used: str) -> None:
    (cgroup / folder / limit).write_text("10000\n")
    (cgroup / folder / used).write_text("4000\n")
    assert machine.memory_limit_bytes() == 10000 and machine.available_memory_bytes() == 6000
    (cgroup / folder / used).write_text("14000\n")
    assert machine.available_memory_bytes() == 0
