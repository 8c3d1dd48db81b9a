"""What a process may use, in containers of both kinds."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from evensong.utils import machine

GIB = 2**30


class Group:
    """A made-up control group tree."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(machine, "CGROUPS", root / "cgroup")
        monkeypatch.setattr(machine, "OWN_GROUPS", root / "own")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
        memory = type("Memory", (), {"total": 64 * GIB, "available": 32 * GIB})
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def own(self, text: str) -> None:
        (self.root / "own").write_text(text)

    def write(self, path: str, text: str | int) -> None:
        file = self.root / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(tmp_path, monkeypatch)


def test_without_a_container_the_machine_counts(group: Group) -> None:
    assert machine.usable_cpus() == 16
    assert machine.memory_limit_bytes() == 64 * GIB
    assert machine.available_memory_bytes() == 32 * GIB


def test_a_container_of_version_2(group: Group) -> None:
    group.own("0::/\n")
    group.write("cpu.max", "250000 100000")
    group.write("memory.max", 4 * GIB)
    group.write("memory.current", 3 * GIB)
    group.write("memory.stat", f"anon 5\ninactive_file {2 * GIB}\nactive_file 7")
    assert machine.usable_cpus() == 3
    assert machine.memory_limit_bytes() == 4 * GIB
    assert machine.available_memory_bytes() == 3 * GIB, "the page cache is not taken memory"


def test_unlimited_groups_limit_nothing(group: Group) -> None:
    group.own("0::/\n")
    group.write("cpu.max", "max 100000")
    group.write("memory.max", "max")
    group.write("memory.current", 3 * GIB)
    assert (machine.usable_cpus(), machine.memory_limit_bytes()) == (16, 64 * GIB)
    assert machine.available_memory_bytes() == 32 * GIB


def test_the_tightest_group_of_those_above_counts(group: Group) -> None:
    group.own("0::/a/b\n")
    group.write("a/memory.max", 2 * GIB)
    group.write("a/memory.current", 2 * GIB + 5)
    group.write("a/b/memory.max", 8 * GIB)
    group.write("a/b/memory.current", GIB)
    group.write("a/b/cpu.max", "50000 100000")
    assert machine.usable_cpus() == 1
    assert machine.memory_limit_bytes() == 2 * GIB
    assert machine.available_memory_bytes() == 0


def test_a_container_of_version_1_whose_path_is_the_hosts(group: Group) -> None:
    group.own("11:memory:/docker/0abc\n4:cpu,cpuacct:/docker/0abc\n")
    group.write("memory/memory.limit_in_bytes", 6 * GIB)
    group.write("memory/memory.usage_in_bytes", 2 * GIB)
    group.write("memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}")
    group.write("cpu/cpu.cfs_quota_us", 200000)
    group.write("cpu/cpu.cfs_period_us", 100000)
    assert machine.usable_cpus() == 2
    assert machine.memory_limit_bytes() == 6 * GIB
    assert machine.available_memory_bytes() == 5 * GIB


def test_no_quota_in_version_1(group: Group) -> None:
    group.own("4:cpu,cpuacct:/\n3:memory:/\n")
    group.write("cpu/cpu.cfs_quota_us", -1)
    group.write("cpu/cpu.cfs_period_us", 100000)
    group.write("memory/memory.limit_in_bytes", 2**63 - 4096)
    group.write("memory/memory.usage_in_bytes", 9)
    assert (machine.usable_cpus(), machine.memory_limit_bytes()) == (16, 64 * GIB)
    assert machine.available_memory_bytes() == 32 * GIB
