"""Sizes: files, functions, classes, package roots. A limit is raised here, visibly, with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.tree import SRC, modules, record_classes

FILE_LINES = 500
FUNCTION_LINES = 80
CLASS_ATTRIBUTES = 15
CLASS_METHODS = 15
INIT_LINES = 40
# path or path::name -> (limit, reason)
RAISED: dict[str, tuple[int, str]] = {}


def limit(key: str, default: int) -> int:
    """The limit of one file, function or class."""
    return RAISED[key][0] if key in RAISED else default


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function in a module, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def` to its end, its docstring not counted."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class's methods assign on `self`, and its annotated fields."""
    fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    names = {target.id for target in fields if isinstance(target, ast.Name)}
    for item in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(item, ast.Assign):
            targets = item.targets
        elif isinstance(item, (ast.AnnAssign, ast.AugAssign)):
            targets = [item.target]
        for target in targets:
            for leaf in ast.walk(target):
                if isinstance(leaf, ast.Attribute) and isinstance(leaf.value, ast.Name) and leaf.value.id == "self":
                    names.add(leaf.attr)
    return names


def methods(node: ast.ClassDef) -> set[str]:
    """Public methods and properties of a class."""
    return {
        item.name
        for item in node.body
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and not item.name.startswith("_")
    }


@pytest.mark.parametrize("path", modules(), ids=str)
def test_file_fits(path: Path) -> None:
    lines = len((SRC / path).read_text().splitlines())
    allowed = INIT_LINES if path.name == "__init__.py" else limit(str(path), FILE_LINES)
    assert lines <= allowed, f"{path} has {lines} lines, at most {allowed}: the seam is wrong, move it"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_functions_fit(path: Path) -> None:
    tree = ast.parse((SRC / path).read_text())
    long = [f"{n.name}: {length(n)}" for n in functions(tree) if length(n) > limit(f"{path}::{n.name}", FUNCTION_LINES)]
    assert not long, f"{path} has functions over {FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_classes_fit(path: Path) -> None:
    tree = ast.parse((SRC / path).read_text())
    records = record_classes(path, tree)
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name not in records):
        key = f"{path}::{node.name}"
        found = attributes(node)
        assert len(found) <= limit(key, CLASS_ATTRIBUTES), f"{key} has {len(found)} attributes: {sorted(found)}"
        assert len(methods(node)) <= CLASS_METHODS, f"{key} has {len(methods(node))} public methods"


@pytest.mark.parametrize("path", [p for p in modules() if p.name == "__init__.py"], ids=str)
def test_package_roots_hold_no_logic(path: Path) -> None:
    """A docstring, imports, names; the project's root may also load its public names lazily."""
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If)
    for node in ast.parse((SRC / path).read_text()).body:
        names = ("__getattr__", "__dir__") if path == Path("__init__.py") else ()
        lazy = isinstance(node, ast.FunctionDef) and node.name in names
        assert isinstance(node, allowed) or lazy, f"{path} holds logic at line {node.lineno}"


def test_every_raised_limit_has_a_reason_and_a_target() -> None:
    for key, (_, reason) in RAISED.items():
        assert reason and (SRC / key.split("::")[0]).exists(), key


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the largest file, function and class, for whoever reads the log."""
    largest = {"file": (0, ""), "function": (0, ""), "class attributes": (0, ""), "class methods": (0, "")}
    for path in modules():
        text = (SRC / path).read_text()
        tree = ast.parse(text)
        records = record_classes(path, tree)
        largest["file"] = max(largest["file"], (len(text.splitlines()), str(path)))
        for node in functions(tree):
            largest["function"] = max(largest["function"], (length(node), f"{path}::{node.name}"))
        for cls in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name not in records):
            name = f"{path}::{cls.name}"
            largest["class attributes"] = max(largest["class attributes"], (len(attributes(cls)), name))
            largest["class methods"] = max(largest["class methods"], (len(methods(cls)), name))
    with capsys.disabled():
        shown = "; ".join(f"largest {kind} {size} ({name})" for kind, (size, name) in largest.items())
        print(f"\narchitecture: {shown}")
    assert all(size for size, _ in largest.values())
