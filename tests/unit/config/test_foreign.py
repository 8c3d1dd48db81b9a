"""Settings of vLLM: a script that changes its import runs, unless it asks for what evensong does not do."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.config.foreign import FOREIGN
from evensong.config.resolve import EngineArgs
from evensong.config.sections import ENGINE_SECTIONS
from evensong.protocol.errors import ConfigError

USUAL = {
    "data_parallel_size": 1,
    "gpu_memory_utilization": 0.9,
    "swap_space": 4,
    "trust_remote_code": True,
    "quantization": None,
    "tokenizer_mode": "auto",
}


def test_a_usual_script_changes_nothing() -> None:
    assert EngineArgs("demo", max_num_seqs=8, **USUAL).config == EngineArgs("demo", max_num_seqs=8).config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", 2),
        ("data_parallel_size", True),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", -1),
        ("trust_remote_code", "yes"),
        ("quantization", "awq"),
        ("tokenizer", "another/model"),
        ("enable_lora", True),
    ],
)
def test_what_cannot_be_left_out_is_refused_with_the_reason(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be .*: {FOREIGN[name].instead}"):
        EngineArgs("demo", **{name: value})


def test_no_setting_is_both_foreign_and_our_own() -> None:
    own = {name for section in ENGINE_SECTIONS.values() for name in section.__dataclass_fields__}  # type: ignore[attr-defined]
    assert not own & set(FOREIGN)
