"""What this process may use: processors and memory, the container's limits counted."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def usable_cpus() -> int:
    """Processors that this process may run on: its affinity, and the container's quota rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(_CGROUP_V2 / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        count = min(count, max(1, -(-int(quota[0]) // int(quota[1]))))
    return count


def memory_limit_bytes() -> int:
    """Memory that this process may use at most: the container's limit, else the machine's."""
    total = int(psutil.virtual_memory().total)
    for path in (_CGROUP_V2 / "memory.max", _CGROUP_V1 / "memory.limit_in_bytes"):
        text = _read(path)
        if text.isdigit():
            total = min(total, int(text))
    return total


def available_memory_bytes() -> int:
    """Memory that can still be taken under the container's limit and on the machine."""
    available = int(psutil.virtual_memory().available)
    for folder, used in ((_CGROUP_V2, "memory.current"), (_CGROUP_V1, "memory.usage_in_bytes")):
        text = _read(folder / used)
        if text.isdigit():
            available = min(available, max(memory_limit_bytes() - int(text), 0))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
