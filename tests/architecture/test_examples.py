"""Every client example says what it needs, pinned, and stands in the page of clients."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT

SCRIPTS = sorted((ROOT / "examples" / "clients").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_client_names_its_requirements(path: Path) -> None:
    text = path.read_text()
    header = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.M)
    assert header is not None, "a PEP 723 header is missing"
    fields = tomllib.loads("\n".join(line.lstrip("# ") for line in header[1].splitlines()))
    assert fields["dependencies"] and all(re.fullmatch(r"[\w.-]+==[\w.]+", name) for name in fields["dependencies"])
    assert ast.get_docstring(ast.parse(text)), "it does not say what it shows"


def test_the_clients_of_the_page_are_these() -> None:
    assert len(SCRIPTS) >= 7
    page = (ROOT / "docs" / "clients.md").read_text()
    assert all(path.name in page for path in SCRIPTS)
