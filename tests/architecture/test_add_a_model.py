"""docs/add-a-model.md says what is so: its pieces of code stand in the files that it names, its places exist."""

from __future__ import annotations

import re

from tests.architecture.tree import ROOT, SRC

TEXT = (ROOT / "docs" / "add-a-model.md").read_text()


def test_pieces_of_code_stand_in_their_files() -> None:
    pieces = re.findall(r"^`([\w/.]+\.py)`\n\n```python\n(.*?)```$", TEXT, re.M | re.S)
    assert len(pieces) == 3 == TEXT.count("```python")
    for path, code in pieces:
        assert code in (ROOT / path).read_text(), f"{path} no longer holds what the page shows of it"


def test_places_and_names_exist() -> None:
    places = re.findall(r"`([a-z]\w*(?:/\w+)*/\w+\.py)(?:::(\w+))?`", TEXT)
    assert len(places) > 10
    for path, name in places:
        file = SRC / path if (SRC / path).exists() else ROOT / path
        assert file.exists(), f"{path} does not exist"
        assert re.search(rf"^(class|def) {name}\b", file.read_text(), re.M) or not name, f"{path} has no {name}"


def test_methods_and_fields_exist() -> None:
    decoder = (SRC / "models" / "decoder.py").read_text()
    row = next(line for line in TEXT.splitlines() if line.startswith("| names of tensors"))
    methods = re.findall(r"`(\w+)`", row)
    assert len(methods) == 7
    for name in methods:
        assert re.search(rf"    (def {name}\(self, |{name} = )", decoder), f"DecoderModel has no {name}"
    families = (SRC / "sources" / "families.py").read_text()
    for name in ("gguf_names", "gguf_pairs"):
        assert f"`{name}`" in TEXT and re.search(rf"^    {name}: ", families, re.M)
    tests = (ROOT / "tests" / "unit" / "models" / "test_families.py").read_text()
    assert "def test_chunks_and_neighbours_change_no_bit" in tests and re.search(r"^GGUF\b", tests, re.M)
