"""Imports go downwards, in one direction, and torch stays out of every process that does not need it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ORDER, SRC, TORCH_PACKAGES, dotted, imports, modules, rank, unit

# importer -> imported: the doors of the design, each with its reason.
DOORS = {
    ("engine.client.inproc", "engine.core"): "InprocClient runs the core in the caller's process",
}
ISLANDS = {
    "front end": ("entrypoints", "engine.frontend", "engine.client", "engine.async_llm", "engine.llm_engine"),
    "core": ("engine.core", "scheduler", "kvcache"),
    "device": ("worker", "models", "layers", "sampling", "kernels"),
}
# What every island may use although it lies in another: the child's side of the handshake is one piece of code.
SHARED_MODULES = ("evensong.engine.core.handshake",)
OPTIONAL_THIRD_PARTIES = (
    "gguf",
    "huggingface_hub",
    "matplotlib",
    "opentelemetry",
    "transformers",
    "uvloop",
    "xgrammar",
)


def ours(path: Path) -> set[str]:
    """Modules of evensong that a file imports."""
    return {name for name in imports(path) if name.split(".")[0] == "evensong"}


@pytest.mark.parametrize("path", modules(), ids=str)
def test_no_upward_import(path: Path) -> None:
    here = dotted(path)
    place = rank(here)
    if place is None:
        return
    for name in ours(path):
        other = rank(name)
        assert other is None or other >= place, f"{here} imports {name}, which lies above it"
        assert not name.startswith("evensong.testing"), f"{here} imports a fake"


def test_no_cycles_between_packages() -> None:
    edges: dict[str, set[str]] = {}
    for path in modules():
        here = unit(dotted(path))
        if here:
            edges.setdefault(here, set()).update(u for n in ours(path) if (u := unit(n)) and u != here)
    done: set[str] = set()

    def visit(node: str, trail: tuple[str, ...]) -> None:
        assert node not in trail, f"import cycle: {' -> '.join([*trail, node])}"
        if node not in done:
            for other in edges.get(node, ()):
                visit(other, (*trail, node))
            done.add(node)

    for node in list(edges):
        visit(node, ())


@pytest.mark.parametrize("path", modules(), ids=str)
def test_islands_meet_only_in_protocol_and_config(path: Path) -> None:
    here = dotted(path)
    mine = unit(here)
    for name, members in ISLANDS.items():
        if mine not in members:
            continue
        foreign = {u for other, units in ISLANDS.items() if other != name for u in units}
        for imported in ours(path):
            if imported in SHARED_MODULES or any(m.startswith(imported) for m in SHARED_MODULES):
                continue
            target = unit(imported)
            door = (here.removeprefix("evensong."), target or "")
            assert target not in foreign or door in DOORS, f"{here} ({name}) imports {imported}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_torch_only_on_the_device_island(path: Path) -> None:
    package = path.parts[0]
    roots = {name.split(".")[0] for name in imports(path)}
    assert package in TORCH_PACKAGES or not roots & {"torch", "transformers"}, f"{path} imports torch or transformers"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_no_function_local_imports(path: Path) -> None:
    for node in ast.walk(ast.parse((SRC / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                names = []
                if isinstance(inner, ast.Import):
                    names = [alias.name for alias in inner.names]
                elif isinstance(inner, ast.ImportFrom):
                    names = [inner.module or ""]
                for name in names:
                    assert name.split(".")[0] in OPTIONAL_THIRD_PARTIES, f"{path}:{inner.lineno} imports {name} locally"


def test_every_other_module_imports_with_torch_blocked() -> None:
    names = [dotted(path) for path in modules() if path.parts[0] not in TORCH_PACKAGES and path.name != "__main__.py"]
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert not any(m.split('.')[0] == 'torch' and sys.modules[m] for m in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_native_path_needs_no_torch() -> None:
    names = ["worker.worker", "worker.native_device", "models.decoder", "models.gemma3", "sampling.native_draws"]
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}: importlib.import_module('evensong.' + name)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_import_evensong_is_light() -> None:
    """The name alone loads nothing of the engine (the time itself is a benchmark: benchmarks/startup.py)."""
    heavy = ("torch", "zmq", "msgspec", "numpy")
    program = f"import sys, evensong; print([m for m in sys.modules if m.split('.')[0] in {heavy!r}])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_the_launcher_loads_no_torch_and_no_http_framework() -> None:
    program = (
        "import sys, importlib\n"
        "importlib.import_module('evensong.entrypoints.cli.serve')\n"
        "heavy = ('torch', 'fastapi', 'starlette', 'uvicorn', 'transformers', 'huggingface_hub')\n"
        "print([m for m in sys.modules if m in heavy])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_the_order_names_real_places() -> None:
    for group in ORDER:
        for name in group:
            place = SRC.joinpath(*name.split("."))
            exists = place.is_dir() or place.with_suffix(".py").exists()
            assert exists, f"ORDER names {name}, which does not exist"
