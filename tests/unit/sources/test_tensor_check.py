"""What a model expects against what its files hold: one error, which names the first tensor, before any is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from evensong.protocol.errors import ConfigError
from evensong.sources import dequant
from evensong.sources.gguf_file import GGML_TYPES
from evensong.sources.tensor_check import check_tensors
from evensong.sources.weights import TensorEntry, open_weights
from tests.unit.sources.files import hf_weights, tiny_folder, tiny_gguf

EXPECTED = {name: array.shape for name, array in hf_weights().items()}
Q, K = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")


def entries() -> dict[str, TensorEntry]:
    """All as the model expects it; the bytes are those of one tensor of each size."""
    return {name: entry(name, shape) for name, shape in EXPECTED.items()}


def entry(name: str, shape: tuple[int, ...], dtype: str = "F32", extra: int = 0) -> TensorEntry:
    block, size = next((block, size) for other, block, size in GGML_TYPES.values() if other == dtype)
    return TensorEntry(name, dtype, shape, np.zeros(int(np.prod(shape)) // block * size + extra, np.uint8))


def refusal(weights: dict[str, TensorEntry], ignored: Any = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        check_tensors(EXPECTED, weights, ignored)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "gguf", "q8_0"])
def test_sound_files_pass_and_are_not_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequant, "dequantize", None)
    if kind == "folder":
        source = tiny_folder(tmp_path / "m", shards=2)
    else:
        source = tiny_gguf(tmp_path / "m.gguf", dtype=gguf.GGMLQuantizationType.Q8_0 if kind == "q8_0" else None)
    check_tensors(EXPECTED, open_weights(source))


@pytest.mark.parametrize("dtype", [name for name, _, _ in GGML_TYPES.values()])
def test_the_bytes_of_every_type(dtype: str) -> None:
    check_tensors({"x": (3, 512)}, {"x": entry("x", (3, 512), dtype)})
    for extra in (-1, 1):
        with pytest.raises(ConfigError, match=rf"tensor x has \d+ bytes, \d+ are those of {dtype} \[3, 512\]"):
            check_tensors({"x": (3, 512)}, {"x": entry("x", (3, 512), dtype, extra)})


def test_a_missing_tensor_is_named_and_the_others_counted() -> None:
    weights = entries()
    del weights[K]
    assert refusal(weights) == f"the model's files hold no tensor {K}"
    del weights[Q]
    assert refusal(weights) == f"the model's files hold no tensor {Q}; 1 more tensor is missing or not as expected"
    weights["model.norm.weight"] = entry("model.norm.weight", (65,))
    assert refusal(weights) == (
        "the tensor model.norm.weight has shape [65], expected [64]; 2 more tensors are missing or not as expected"
    )
    assert f"; {len(EXPECTED) - 1} more tensors are" in refusal({})


@pytest.mark.parametrize(
    ("shape", "shown"), [((64, 63), "[64, 63]"), ((64, 64, 1), "[64, 64, 1]"), ((4096,), "[4096]"), ((), "[]")]
)
def test_a_mis_shaped_tensor(shape: tuple[int, ...], shown: str) -> None:
    assert refusal({**entries(), Q: entry(Q, shape)}) == f"the tensor {Q} has shape {shown}, expected [64, 64]"


def test_surplus_tensors_unless_they_are_ignored() -> None:
    weights = {**entries(), "lm_head.weight": entry("lm_head.weight", (2, 2))}
    check_tensors(EXPECTED, weights, {"lm_head.weight", "not there"})
    assert "hold 1 tensor that the model does not have, such as 'lm_head.weight'" in refusal(weights)
    weights["a\nb"] = entry("a", (1,))
    assert "hold 2 tensors that the model does not have, such as 'a\\nb'" in refusal(weights)
    del weights[Q]
    assert "no tensor" in refusal(weights) and "more" not in refusal(weights)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": "I64"}, "is of type 'I64', not supported"),
        ({"dtype": "F16"}, "has 16384 bytes, 8192 are those of F16 [64, 64]"),
        ({"dtype": "Q4_K"}, "which is not one of blocks of 256"),
        ({"rotary_heads": 3}, "has 64 rows, which are not 3 heads"),
        ({"rotary_heads": -1}, "has 64 rows, which are not -1 heads"),
    ],
)
def test_what_could_not_be_dequantised(changes: dict[str, Any], match: str) -> None:
    assert match in refusal({**entries(), Q: replace(entries()[Q], **changes)})


def test_absurd_expectations_allocate_nothing() -> None:
    shape = (2**31, 2**31)
    with pytest.raises(ConfigError, match=r"has shape \[64, 64\], expected \[2147483648, 2147483648\]"):
        check_tensors({Q: shape}, {Q: entries()[Q]})
    lying = TensorEntry(Q, "F32", shape, np.zeros(16, np.uint8))
    with pytest.raises(ConfigError, match="has 16 bytes"):
        check_tensors({Q: shape}, {Q: lying})


def test_no_values() -> None:
    with pytest.raises(ConfigError, match="blocks of 1"):
        check_tensors({Q: (0, 4)}, {Q: TensorEntry(Q, "F32", (0, 4), np.zeros(0, np.uint8))})
