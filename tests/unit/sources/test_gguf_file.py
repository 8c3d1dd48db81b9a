"""The GGUF reader against the format's own library, and against damage."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evensong.protocol.errors import ConfigError
from evensong.sources import gguf_file
from evensong.sources.dequant import dequantize
from evensong.sources.gguf_file import GGML_TYPES, GGUFFile
from evensong.sources.gguf_tokenizer import convert
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import ModelSource
from evensong.sources.weights import open_weights
from tests.fuzz.make_seeds import ARRAY, BOOL, STRING, U8, U32, gguf_bytes
from tests.unit.sources.files import tiny_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound file."""
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").path.read_bytes()


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(demo_model)


def test_types_agree_with_the_library() -> None:
    for number, (name, block, block_bytes) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, block_bytes))


def test_every_type_of_the_library_is_read_or_refused_by_name(tmp_path: Path, whole: bytes) -> None:
    name = b"blk.1.attn_q.weight"
    place = whole.index(name) + len(name) + 20
    for kind in gguf.GGMLQuantizationType:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            readable = True
        except NotImplementedError:
            readable = kind.name in ("F32", "F16")
        assert (kind in GGML_TYPES) == readable, kind.name
        if not readable:
            data = bytearray(whole)
            struct.pack_into("<I", data, place, kind)
            (tmp_path / "t.gguf").write_bytes(data)
            with pytest.raises(ConfigError, match=f"of type {kind.name}, not supported"):
                GGUFFile(tmp_path / "t.gguf")


def test_every_value_of_the_demo_agrees(demo_model: Path, reference: gguf.GGUFReader) -> None:
    file = GGUFFile(demo_model)
    expected = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert file.keys == list(expected)
    for name, field in expected.items():
        assert file.get(name) == field.contents(), name


def test_every_tensor_of_the_demo_agrees(demo_model: Path, reference: gguf.GGUFReader) -> None:
    file = GGUFFile(demo_model)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        mine = file.tensors[tensor.name]
        assert mine.dtype == tensor.tensor_type.name
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert np.array_equal(mine.data, tensor.data.view(np.uint8).reshape(-1)), tensor.name


def test_dequantised_demo_agrees(demo_model: Path, reference: gguf.GGUFReader) -> None:
    """Tensors without rotary rows must be equal bit for bit."""
    entries = open_weights(ModelSource("gguf", demo_model, "demo"))
    stored = {tensor.name: tensor for tensor in reference.tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.layers.3.input_layernorm.weight": "blk.3.attn_norm.weight",
    }
    for name, gguf_name in pairs.items():
        tensor = stored[gguf_name]
        assert np.array_equal(dequantize(entries[name]), gguf.dequantize(tensor.data, tensor.tensor_type)), name


def test_all_scalar_kinds_and_arrays(tmp_path: Path) -> None:
    values: dict[str, tuple[str, Any]] = {
        "x.u8": ("add_uint8", 255),
        "x.i8": ("add_int8", -128),
        "x.u16": ("add_uint16", 65535),
        "x.i16": ("add_int16", -32768),
        "x.u32": ("add_uint32", 2**32 - 1),
        "x.i32": ("add_int32", -(2**31)),
        "x.u64": ("add_uint64", 2**64 - 1),
        "x.i64": ("add_int64", -(2**63)),
        "x.f32": ("add_float32", 0.5),
        "x.f64": ("add_float64", 0.1),
        "x.bool": ("add_bool", True),
        "x.string": ("add_string", "päß 🙂"),
        "x.ints": ("add_array", [1, -2, 3]),
        "x.floats": ("add_array", [0.5, -1.25]),
        "x.bools": ("add_array", [True, False]),
        "x.strings": ("add_array", ["", "a", "日本"]),
    }
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    for key, (method, value) in values.items():
        getattr(writer, method)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "kinds.gguf")
    assert {key: file.get(key) for key in values} == {key: value for key, (_, value) in values.items()}
    assert file.get("x.none") is None and file.get("x.none", 7) == 7
    assert (file.length("x.strings"), file.length("x.u8"), file.length("x.none")) == (3, 0, 0)


def test_version_2_is_read_and_others_are_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(whole[:4] + struct.pack("<I", 2) + whole[8:])
    assert GGUFFile(path).get("general.architecture") == "llama"
    for version in (0, 1, 4, 3 << 24):
        path.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        with pytest.raises(ConfigError, match=f"version {version}"):
            GGUFFile(path)


def test_the_data_is_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    data = GGUFFile(tiny_gguf(tmp_path / "m.gguf").path).tensors["token_embd.weight"].data
    assert isinstance(data.obj, mmap.mmap) and data.readonly


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"GGUF\3\0\0\0", b"not a model at all" * 10], ids=repr)
def test_what_is_no_gguf_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)


@pytest.mark.parametrize("counts", [(2**63, 1), (1, 2**63), (2**64 - 1, 2**64 - 1), (10**9, 0)])
def test_absurd_counts_cost_nothing(tmp_path: Path, whole: bytes, counts: tuple[int, int]) -> None:
    path = tmp_path / "counts.gguf"
    path.write_bytes(whole[:8] + struct.pack("<QQ", *counts) + whole[24:])
    with pytest.raises(ConfigError, match="cannot fit"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("what", "match"),
    [("offset", "lies outside"), ("type", "of type 99, not supported"), ("dimensions", "77 dimensions")],
)
def test_tensor_infos_out_of_bounds(tmp_path: Path, whole: bytes, what: str, match: str) -> None:
    name = b"blk.1.attn_q.weight"
    at = whole.index(name) + len(name)
    # After the name: dimension count (4 bytes), two dimensions (8 each), type (4), offset (8).
    edits = {"dimensions": (at, "<I", 77), "type": (at + 20, "<I", 99), "offset": (at + 24, "<Q", 2**62)}
    place, form, value = edits[what]
    data = bytearray(whole)
    struct.pack_into(form, data, place, value)
    path = tmp_path / "infos.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=match):
        GGUFFile(path)


TENSOR = {"a": ("F32", (8,)), "b": ("F32", (8,))}


def place_of(data: bytes, name: bytes) -> int:
    """Where the offset of a tensor of one dimension is stored."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8 + 4


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("offset", "match"),
    [(0, "tensor 'b' overlaps with 'a'"), (33, "tensor 'b' starts at 33, not a multiple of 32"), (64, "lies outside")],
)
def test_tensors_lie_side_by_side(tmp_path: Path, offset: int, match: str) -> None:
    data = bytearray(gguf_bytes({}, TENSOR))
    assert struct.unpack_from("<Q", data, place_of(data, b"b")) == (32,)
    struct.pack_into("<Q", data, place_of(data, b"b"), offset)
    assert match in refusal(tmp_path / "t.gguf", data)


def test_a_truncated_file_names_the_first_tensor_that_is_not_whole(tmp_path: Path) -> None:
    assert "tensor 'b' lies outside the file (truncated?)" in refusal(tmp_path / "t.gguf", gguf_bytes({}, TENSOR)[:-1])
    assert "tensor 'a' lies outside the file" in refusal(tmp_path / "t.gguf", gguf_bytes({}, TENSOR)[:-33])


def test_two_values_or_tensors_of_one_name(tmp_path: Path) -> None:
    twice = gguf_bytes({"x.a": (U32, 1), "x.b": (U32, 2)}, {}).replace(b"x.b", b"x.a")
    assert "two values named 'x.a'" in refusal(tmp_path / "t.gguf", twice)
    twice = gguf_bytes({}, {"aa": ("F32", (1,)), "bb": ("F32", (1,))}).replace(b"bb", b"aa")
    assert "two tensors named 'aa'" in refusal(tmp_path / "t.gguf", twice)


@pytest.mark.parametrize("alignment", [(BOOL, True), (U32, 0), (U32, 2**30), (STRING, "32")])
def test_an_alignment_that_is_none(tmp_path: Path, alignment: tuple[int, Any]) -> None:
    assert "alignment" in refusal(tmp_path / "t.gguf", gguf_bytes({"general.alignment": alignment}, TENSOR))


@pytest.mark.parametrize("limit", ["_MAX_ITEMS", "_MAX_TENSORS", "_MAX_METADATA"])
def test_a_large_file_cannot_fill_the_memory(tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limits lowered, for a file of many GB could hold as many items as it says."""
    data = gguf_bytes({"x.a": ((ARRAY, U8), [1] * 200)}, {str(i): ("F32", (1,)) for i in range(100)})
    path = tmp_path / "t.gguf"
    path.write_bytes(data)
    assert GGUFFile(path).length("x.a") == 200
    monkeypatch.setattr(gguf_file, limit, 99)
    assert refusal(path, data)


def use_everything(path: Path) -> None:
    """Reads all that a start would read of a model file."""
    source = ModelSource("gguf", path, path.name)
    load_model_description(source)
    convert(GGUFFile(path))
    for entry in open_weights(source).values():
        dequantize(entry)


def test_a_sound_file_is_read(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(whole)
    use_everything(path)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_a_truncated_file_is_a_config_error(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    path = tmp_path / "cut.gguf"
    # The last tensor ends within one alignment (32 bytes) of the end.
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])
    with pytest.raises(ConfigError) as caught:
        use_everything(path)
    assert "\n" not in str(caught.value)


@FUZZ
@given(data=st.data())
def test_a_garbled_header_is_never_anything_but_a_config_error(
    tmp_path: Path, whole: bytes, data: st.DataObject
) -> None:
    header = whole.index(b"blk.1.ffn_norm.weight") + 45
    garbled = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, header))
        junk = data.draw(st.binary(min_size=1, max_size=8))
        garbled[place : place + len(junk)] = junk
    path = tmp_path / "garbled.gguf"
    path.write_bytes(garbled)
    try:
        use_everything(path)
    except ConfigError as error:
        assert len(str(error)) < 2000
