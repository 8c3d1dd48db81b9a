"""What this process may use: processors and memory, the container's limits counted.

Control groups: version 2 as in the kernel's cgroup-v2 document, version 1 as in its cpu and memory controller
documents. Limits hold for a group and all groups above it, so the tightest one counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# What NVIDIA's driver makes on Linux and under WSL.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


def may_have_cuda() -> bool:
    """Whether NVIDIA's driver is there: without it, neither torch nor the driver's own library need be asked."""
    return any(Path(file).exists() for file in _DRIVER_FILES)


def usable_cpus() -> int:
    """Processors that this process may run on: its affinity, and the container's quota rounded up; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            count = min(count, max(1, -(-int(quota) // int(period))))
    return count


def compute_threads() -> int:
    """Threads that share a step: every processor that may be used, or fewer where OMP_NUM_THREADS says so."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(usable_cpus(), int(asked)) if asked.isdigit() and int(asked) else usable_cpus()


def memory_limit_bytes() -> int:
    """Memory that this process may use at most: the container's limit, else the machine's."""
    limits = [limit for limit, _ in _memory_groups()]
    return min(limits + [int(psutil.virtual_memory().total)])


def available_memory_bytes() -> int:
    """Memory that can still be taken under the container's limit and on the machine.

    Pages of files that were read and are not in use do not count as taken: the kernel drops them first.
    """
    left = [max(limit - used, 0) for limit, used in _memory_groups()]
    return min(left + [int(psutil.virtual_memory().available)])


def _memory_groups() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of every group that limits this process's memory."""
    for folder in _groups("memory"):
        for limit_file, used_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if limit.isdigit() and used.isdigit():
                yield int(limit), max(int(used) - _field(folder / "memory.stat", cache_key), 0)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those above it, for one controller.

    In a container the paths are often those of the host and do not exist here: the mount's root is its own group then.
    """
    for line in _read(OWN_GROUPS).splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree at the mount itself; version 1 one for each controller.
        root = CGROUPS / controller if controllers else CGROUPS
        folder = root / path.lstrip("/")
        if not folder.is_dir() or ".." in folder.parts:
            folder = root
        while True:
            yield folder
            if folder == root:
                break
            folder = folder.parent


def _field(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def give_back_free_memory() -> None:
    """Returns to the system what this process has freed and its allocator still keeps; glibc alone needs the asking."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
