"""The API is what /openapi.json says: a bounded sample of `make schema-test`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.harness import Server, Survivors
from tests.server.schema_run import FLAGS, STOPPING, run


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return [*FLAGS[2:], "--served-model-name", "demo", "--max-model-len", "128"]


def test_generated_requests_find_no_fault(server: Server, survivors: Survivors, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with survivors.watch():
        done = run(server.url, report, "fuzzing", 3, "--exclude-path-regex", STOPPING)
    assert done.returncode == 0, done.stdout[-6000:]
    assert json.loads(report.read_text())
