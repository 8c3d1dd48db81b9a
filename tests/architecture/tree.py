"""The source tree as the architecture tests see it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "evensong"

# Highest first: a package imports only those after it (or in its own group).
ORDER: list[tuple[str, ...]] = [
    ("entrypoints",),
    ("engine.launch",),
    ("engine.async_llm", "engine.llm_engine"),
    ("engine.frontend", "engine.client"),
    ("engine.core",),
    ("scheduler",),
    ("kvcache",),
    ("executor",),
    ("worker",),
    ("models",),
    ("layers", "sampling"),
    ("kernels",),
    ("distributed",),
    ("sources",),
    ("observe",),
    ("config",),
    ("protocol",),
    ("utils",),
]
TORCH_PACKAGES = ("worker", "models", "layers", "sampling", "kernels", "distributed", "testing")
# The last ones: bases of HTTP forms that are written in another file.
RECORD_BASES = {"Struct", "BaseModel", "TypedDict", "NamedTuple", "Exception", "Form", "EngineForm"}


def modules() -> list[Path]:
    """Every module of the package, relative to its root."""
    return sorted(path.relative_to(SRC) for path in SRC.rglob("*.py"))


def dotted(path: Path) -> str:
    """`engine/core/loop.py` as `evensong.engine.core.loop`."""
    parts = [*path.with_suffix("").parts]
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join(["evensong", *parts])


def rank(module: str) -> int | None:
    """A module's place in ORDER, None for the root, testing and package markers."""
    name = module.removeprefix("evensong").removeprefix(".")
    for place, group in enumerate(ORDER):
        for prefix in group:
            if name == prefix or name.startswith(prefix + ".") or name.startswith(prefix + "_"):
                return place
    return None


def unit(module: str) -> str | None:
    """The package (a folder inside engine/ counts as one) that a module belongs to."""
    name = module.removeprefix("evensong").removeprefix(".")
    for group in ORDER:
        for prefix in group:
            if name == prefix or name.startswith(prefix + ".") or name.startswith(prefix + "_"):
                return prefix
    return None


def type_checking_lines(tree: ast.Module) -> set[int]:
    """Lines inside `if TYPE_CHECKING:` blocks, whose imports do not run."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in node.body:
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    return lines


def imports(path: Path, *, only_running: bool = False) -> set[str]:
    """Modules that a file imports, dotted; `from a import b` gives a and, where b is a module of ours, a.b."""
    tree = ast.parse((SRC / path).read_text())
    skipped = type_checking_lines(tree) if only_running else set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            base = node.module or ""
            found.add(base)
            for alias in node.names:
                place = SRC.parent / Path(*base.split("."), alias.name)
                if base.startswith("evensong") and (place.with_suffix(".py").exists() or place.is_dir()):
                    found.add(f"{base}.{alias.name}")
    return found


def record_classes(path: Path, tree: ast.Module) -> set[str]:
    """Classes that are config or protocol records, or HTTP forms: their fields are not counted."""
    records: set[str] = set()
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        bases = {ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases}
        frozen = any("dataclass" in ast.unparse(d) and "frozen=True" in ast.unparse(d) for d in node.decorator_list)
        if bases & (RECORD_BASES | records) or frozen:
            records.add(node.name)
    return records
