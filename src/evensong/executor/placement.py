"""Where ranks run: on a CPU each gets processors of its own, with CUDA each one device. No torch here.

What a worker sees is set for it alone: its processors when it starts, CUDA_VISIBLE_DEVICES in its environment.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evensong.protocol.errors import ConfigError
from evensong.utils.logging import get_logger
from evensong.utils.machine import may_have_cuda, usable_cpus

logger = get_logger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
# The library of NVIDIA's driver that counts what it drives.
_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Place:
    """One rank's: `processors` that it binds to (None: it shares all), and variables for its process alone."""

    processors: tuple[int, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def place_ranks(device: str, num_ranks: int) -> list[Place]:
    """A place for each rank of this host; `device` is the setting. Raises ConfigError: more ranks than devices."""
    if device != "cpu" and may_have_cuda():
        devices = visible_devices(os.environ.get(VISIBLE), count_devices())
        # Where no device can be seen the worker runs on the CPU, unless it was told not to: that it says itself.
        if devices or device == "cuda":
            return on_devices(devices, num_ranks)
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return on_processors(allowed, usable_cpus(), num_ranks, os.environ.get(THREADS, ""))


def on_devices(devices: Sequence[str], num_ranks: int) -> list[Place]:
    """One device for each rank, in order."""
    if num_ranks > len(devices):
        raise ConfigError(
            f"{num_ranks} ranks need {num_ranks} devices; there are {len(devices)} "
            f"(with --device cpu ranks may share processors)"
        )
    return [Place(variables={VISIBLE: device}) for device in devices[:num_ranks]]


def on_processors(allowed: Sequence[int], usable: int, num_ranks: int, threads: str = "") -> list[Place]:
    """The processors `allowed`, divided into neighbours; at most `usable` of them work, fewer where `threads` says so.

    With more ranks than processors, a warning: they share them, one thread each, bound to none.
    """
    if num_ranks > min(len(allowed), usable):
        if allowed:
            logger.warning(
                "%d ranks share %d processors: each step takes longer than with fewer ranks", num_ranks, usable
            )
        return [Place(variables={THREADS: "1"}) for _ in range(num_ranks)]
    most = int(threads) if threads.isdigit() and int(threads) else len(allowed)
    places = []
    for rank in range(num_ranks):
        first, stop = _share(len(allowed), rank, num_ranks)
        # A quota of processor time below the number of processors is divided, too.
        begin, end = _share(usable, rank, num_ranks)
        own = tuple(allowed[first : first + min(stop - first, end - begin, most)])
        places.append(Place(own, {THREADS: str(len(own))}))
    return places


def _share(total: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """From where to where a rank's part of `total` things reaches; the first ranks have one more."""
    first, stop = (-(-total * edge // num_ranks) for edge in (rank, rank + 1))
    return first, stop


def visible_devices(setting: str | None, count: int) -> list[str]:
    """The devices that this process may give to its ranks, as CUDA_VISIBLE_DEVICES names them.

    A setting that is there already is honoured: its names in its order, up to the first that is none (CUDA C++
    Programming Guide, "CUDA Environment Variables").
    """
    if setting is None:
        return [str(index) for index in range(count)]
    visible: list[str] = []
    for name in setting.split(","):
        name = name.strip()
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= count):
            break
        visible.append(name)
    return visible


def count_devices() -> int:
    """NVIDIA devices of this host; 0 where the driver does not say."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    try:
        return int(count.value) if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        library.nvmlShutdown()
