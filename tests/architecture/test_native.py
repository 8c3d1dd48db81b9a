"""The rules of native/: sizes, and what the kernels may include."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT

NATIVE = ROOT / "native" / "src"
FILES = sorted(path.relative_to(NATIVE) for path in NATIVE.rglob("*") if path.suffix in (".h", ".cpp"))
FILE_LINES = 500
# C headers, whose functions are not inline, and the processor's intrinsics: see kernels/vec.h for why no others.
ALLOWED_IN_KERNELS = {"cmath", "cstddef", "cstdint", "cstring", "immintrin.h"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_fits(path: Path) -> None:
    lines = len((NATIVE / path).read_text().splitlines())
    assert lines <= FILE_LINES, f"native/src/{path} has {lines} lines, at most {FILE_LINES}: the seam is wrong, move it"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "kernels"], ids=str)
def test_kernels_share_no_inline_code_between_instruction_sets(path: Path) -> None:
    text = (NATIVE / path).read_text()
    foreign = set(re.findall(r"#include <([^>]+)>", text)) - ALLOWED_IN_KERNELS
    assert not foreign, f"native/src/{path} includes {foreign}"
    assert not re.search(r"\bstd::(?!u?int\d+_t|size_t|u?intptr_t|mem(cpy|set|move)\b)\w+", text), (
        f"native/src/{path} uses std::"
    )
    assert "namespace EV_ISA {" in text, f"native/src/{path} stands outside the namespace of its build"
