"""Which executor the settings name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from evensong.config.resolve import resolve
from evensong.executor import factory, multiproc


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("uni", 0)),
        ({"distributed_executor_backend": "uni"}, ("uni", 0)),
        ({"distributed_executor_backend": "mp"}, ("mp", 5)),
        ({"tensor_parallel_size": 2}, ("mp", 5)),
        ({"pipeline_parallel_size": 3, "distributed_executor_backend": "mp"}, ("mp", 5)),
    ],
)
def test_several_ranks_get_processes(
    settings: dict[str, Any], expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "UniProcExecutor", lambda config: ("uni", 0))
    monkeypatch.setattr(multiproc, "MultiprocExecutor", lambda config, replica: ("mp", replica))
    assert factory.make_executor(resolve(settings), 5) == expected


def test_a_core_with_its_worker_inside_imports_nothing_of_other_ranks() -> None:
    program = "import sys, evensong.engine.core.process; sys.exit('evensong.executor.multiproc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
