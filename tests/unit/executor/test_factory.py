"""Which executor the settings name."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.config.resolve import resolve
from evensong.executor import factory


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
    monkeypatch.setattr(factory, "MultiprocExecutor", lambda config, replica: ("mp", replica))
    assert factory.make_executor(resolve(settings), 5) == expected
