"""Replays the fuzzer's corpus, and mutations of it that are the same every time: only ConfigError may come out."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from tests.fuzz.make_seeds import gguf_seeds, safetensors_seeds
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).resolve().parents[2] / "fuzz" / "corpus"
FILES = sorted(path for target in TARGETS for path in (CORPUS / target).iterdir())
# Of each file; converting a tokenizer takes most of a GGUF file's time.
MUTATIONS = {"gguf": 300, "safetensors": 600}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_only_config_errors_come_out(path: Path, tmp_path: Path) -> None:
    target, data = path.parent.name, path.read_bytes()
    assert len(data) <= 4096
    TARGETS[target](data, tmp_path / "input")
    rng = random.Random(zlib.crc32(path.name.encode()))
    for _ in range(MUTATIONS[target]):
        made = mutated(target, data, rng)
        try:
            TARGETS[target](made, tmp_path / "input")
        except BaseException:
            print(f"the input: {made!r}")
            raise


def test_the_seeds_are_those_of_the_script() -> None:
    for target, seeds in (("gguf", gguf_seeds()), ("safetensors", safetensors_seeds())):
        stored = {path.name: path.read_bytes() for path in (CORPUS / target).glob("seed-*")}
        assert stored == {f"seed-{name}": data for name, data in seeds.items()}
        assert len(stored) >= 12
