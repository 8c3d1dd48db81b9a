"""Public schemas with instances: MaskBench, a part of it, and the JSON-Schema-Test-Suite of draft 2020-12.

They lie beside the checkout (../shared/data); without them nothing is tested here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.schema_instances import canonical, write

from evensong.protocol.errors import RequestError
from tests.unit.scheduler.grammar.schema.walking import Grammar

DATA = Path(__file__).resolve().parents[6] / "shared" / "data" / "jsonschema"
MASKBENCH = DATA / "maskbench"
SUITE = DATA / "JSON-Schema-Test-Suite" / "tests" / "draft2020-12"
EVERY = 2  # of MaskBench's files
# Instances that the standard calls valid and that are not written: formats are asserted, not annotated (the suite's
# other half), and of formats three spellings are left out (docs/structured-output.md).
NOT_WRITTEN = {"format", "optional/format/hostname", "optional/format/time", "optional/format/date-time"}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public schemas are not beside the checkout")


def refused(schema: Any) -> str | Grammar:
    """The refusal of a schema, or its grammar."""
    try:
        return Grammar(schema)
    except RequestError as refusal:
        assert refusal.status == 400
        return refusal.message


def test_maskbench_instances_are_let_through_or_not_as_they_should() -> None:
    files = covered = 0
    for path in sorted(MASKBENCH.glob("*.json"))[::EVERY]:
        file = json.loads(path.read_text())
        grammar = refused(file["schema"])
        files += bool(file["tests"])
        if isinstance(grammar, str):
            assert "JSON schema" in grammar
            continue
        for test in file["tests"]:
            text = write(file["schema"], test["data"])
            # What is constrained comes out raw; json.dumps would escape it.
            raw = json.dumps(json.loads(text), ensure_ascii=False)
            assert (grammar.accepts(text) or grammar.accepts(raw)) == test["valid"], (path.name, text)
        covered += bool(file["tests"])
    # llguidance by itself covers 94.3 % of all files.
    assert covered >= 0.95 * files


@pytest.mark.parametrize("folder", [".", "optional", "optional/format"])
def test_the_suites_schemas_are_enforced_or_refused_by_name(folder: str) -> None:
    enforced = 0
    for path in sorted((SUITE / folder).glob("*.json")):
        name = path.stem if folder == "." else f"{folder}/{path.stem}"
        for group in json.loads(path.read_text()):
            grammar = refused(group["schema"])
            if isinstance(grammar, str):
                assert "JSON schema" in grammar
                continue
            enforced += 1
            for test in group["tests"]:
                accepted = grammar.accepts_value(canonical(test["data"]))
                if name in NOT_WRITTEN and test["valid"]:
                    continue
                assert accepted == test["valid"], (name, group["description"], test["description"])
    assert enforced >= {".": 255, "optional": 35, "optional/format": 15}[folder]
