"""generation_config.json as defaults of SamplingParams, by one rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.generation_config import load_generation_defaults
from evensong.sources.resolve import ModelSource
from tests.unit.sources.files import tiny_folder, tiny_gguf

STORED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 2048,
    "eos_token_id": [2, 0],
    "transformers_version": "4.37.0",
}
EXPECTED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 2048}


def write(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return tiny_folder(tmp_path / "m")


def test_the_rule(source: ModelSource, tmp_path: Path) -> None:
    assert load_generation_defaults(source) == {}
    write(source.path, **STORED)
    assert load_generation_defaults(source, "auto") == EXPECTED
    assert SamplingParams(**load_generation_defaults(source)).top_k == 20
    assert load_generation_defaults(source, "vllm") == {}
    override = {"temperature": 0.2, "max_new_tokens": 9}
    assert load_generation_defaults(source, "auto", override) == EXPECTED | {"temperature": 0.2, "max_tokens": 9}
    assert load_generation_defaults(source, "vllm", override) == {"temperature": 0.2, "max_tokens": 9}
    other = write(tmp_path / "other", temperature=0)
    assert load_generation_defaults(source, str(other)) == {"temperature": 0}
    gguf = tiny_gguf(tmp_path / "other" / "t.gguf")
    assert load_generation_defaults(gguf) == {}
    assert load_generation_defaults(gguf, str(other)) == {"temperature": 0}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": True}, "max_tokens"),
    ],
)
def test_values_that_cannot_be(source: ModelSource, values: dict[str, Any], match: str) -> None:
    write(source.path, **values)
    with pytest.raises(ConfigError, match=match) as caught:
        load_generation_defaults(source)
    assert "\n" not in str(caught.value) and "generation_config.json" in str(caught.value)


def test_folders_that_are_none(source: ModelSource, tmp_path: Path) -> None:
    for setting in ("nowhere", "", str(tmp_path), "a" * 5000, "x\x00y"):
        with pytest.raises(ConfigError, match="generation_config"):
            load_generation_defaults(source, setting)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="cannot read"):
        load_generation_defaults(source, str(tmp_path))


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": "all"}, {"max_tokens": 5}, {"num_beams": 4}])
def test_an_override_that_cannot_be(source: ModelSource, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="override_generation_config"):
        load_generation_defaults(source, "vllm", bad)
