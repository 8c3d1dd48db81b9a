"""Launches with a scripted core, and questions about what is left of one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil

from evensong.config.sections import EngineConfig
from evensong.engine.launch import Launch
from evensong.engine.launch_handshake import OnChange
from evensong.engine.launch_table import Limits, ProcessRow
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams

FAKE_TABLE = {"core": ProcessRow("core", "evensong:core-{index}", "tests.engine.fake_core")}
SHORT = Limits(connect=10.0, ready=10.0, exit=2.0)
LAUNCHER = "tests.engine.launching:open_fake_launch"


def open_fake_launch(config: EngineConfig, on_change: OnChange, limits: Limits = SHORT) -> Launch:
    """A launch whose core is tests/engine/fake_core.py."""
    return Launch(config, on_change, table=FAKE_TABLE, limits=limits)


def request(request_id: str, *token_ids: int) -> EngineCoreRequest:
    """A request for the scripted core."""
    return EngineCoreRequest(request_id, list(token_ids), SamplingParams(seed=1))


def children() -> list[int]:
    """Living processes below this one."""
    return [child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """True as soon as `condition` holds, False if it does not within `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def running(pid: int) -> bool:
    """True while the process lives (a zombie does not)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return os.path.exists(f"/proc/{pid}") and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
