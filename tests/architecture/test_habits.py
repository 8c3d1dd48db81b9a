"""Rules that keep the code safe and readable: globals, mixins, sockets, words, true documents."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from evensong.protocol.control import VERBS
from tests.architecture.tree import ROOT, SRC, modules

MUTATED_GLOBALS_ALLOWED = 1


def test_at_most_one_rebound_global() -> None:
    found = []
    for path in modules():
        for node in ast.walk(ast.parse((SRC / path).read_text())):
            if isinstance(node, ast.Global):
                found.append(f"{path}:{node.lineno} {node.names}")
    assert len(found) <= MUTATED_GLOBALS_ALLOWED, found


@pytest.mark.parametrize("path", modules(), ids=str)
def test_no_mixins(path: Path) -> None:
    for node in ast.walk(ast.parse((SRC / path).read_text())):
        if isinstance(node, ast.ClassDef):
            assert "mixin" not in node.name.lower(), f"{path} has {node.name}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_no_pickle_no_eval_no_shell(path: Path) -> None:
    tree = ast.parse((SRC / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {n.split(".")[0] for n in names} & {"pickle", "cloudpickle", "marshal", "multiprocessing"}, path
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{path} uses a shell"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_public_places_have_docstrings(path: Path) -> None:
    tree = ast.parse((SRC / path).read_text())
    assert ast.get_docstring(tree), f"{path} does not say what it is"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}::{node.name} has no docstring"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_nothing_is_left_unfinished(path: Path) -> None:
    text = (SRC / path).read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError", text), path


def test_a_verb_is_written_where_it_acts_and_nowhere_between() -> None:
    """Front ends generate their methods from the table; clients and the launch pass calls on by name."""
    for path in (p for p in modules() if p.parts[0] == "engine" and p.parts[1] != "core"):
        names = {n.name for n in ast.walk(ast.parse((SRC / path).read_text())) if isinstance(n, ast.FunctionDef)}
        # Ending requests is part of a client's own work, not only a verb.
        assert not names & (set(VERBS) - {"abort_requests"}), f"{path} passes a control verb on by hand"


def test_architecture_document_names_real_places() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    sources = {path: (SRC / path).read_text() for path in modules()}
    names = re.findall(r"`([\w./]+\.py)(?:::([\w.]+))?`", text)
    assert len(names) > 20, "ARCHITECTURE.md should follow a request through real files"
    for name, symbol in names:
        place = next((p for p in sources if str(p) == name or str(p).endswith("/" + name)), None)
        outside = (ROOT / name).exists()
        assert place is not None or outside, f"ARCHITECTURE.md names {name}, which does not exist"
        if symbol and place is not None:
            for part in symbol.split("."):
                assert re.search(rf"\b(def|class) {part}\b|^{part}\b", sources[place], re.M), f"{name} has no {symbol}"


def test_documents_do_not_point_at_missing_files() -> None:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    for document in [*top, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} points at {target}"
