"""Weights under one set of names: GGUF against folders, shards, dequantising, digests, damage."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from evensong.protocol.errors import ConfigError
from evensong.sources import weights as module
from evensong.sources.dequant import dequantize
from evensong.sources.gguf_file import GGML_TYPES
from evensong.sources.resolve import ModelSource
from evensong.sources.safetensors_file import read_safetensors
from evensong.sources.weights import TensorEntry, open_weights, source_digest
from tests.unit.sources.files import HEADS, KV_HEADS, LAYERS, hf_weights, tiny_folder, tiny_gguf

NUMBERS = {number: name for number, (name, _, _) in GGML_TYPES.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_has_the_names_and_row_order_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    entries = open_weights(tiny_gguf(tmp_path / "tiny.gguf", tied=tied))
    expected = hf_weights(tied=tied)
    assert set(entries) == set(expected) and len(entries) == len(expected)
    for name, array in expected.items():
        assert np.array_equal(dequantize(entries[name]), array), name
    heads = {name: entry.rotary_heads for name, entry in entries.items() if entry.rotary_heads}
    assert heads == {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": count
        for layer in range(LAYERS)
        for name, count in (("q", HEADS), ("k", KV_HEADS))
    }


def test_quantised_rows_are_put_in_order_after_dequantising(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "q8.gguf", dtype=gguf.GGMLQuantizationType.Q8_0)
    entry = open_weights(source)["model.layers.1.self_attn.k_proj.weight"]
    assert entry.dtype == "Q8_0"
    original = hf_weights()["model.layers.1.self_attn.k_proj.weight"]
    assert np.max(np.abs(dequantize(entry) - original)) < np.max(np.abs(original)) / 100


@pytest.mark.parametrize("kind", [name for name, _, _ in GGML_TYPES.values()])
def test_some_rows_and_columns_are_those_of_the_whole(kind: str) -> None:
    """Of every type, any bytes: what is cut out of the file and what is cut out of the values are the same bits."""
    block, block_bytes = next((size, nbytes) for name, size, nbytes in GGML_TYPES.values() if name == kind)
    rows, columns = 600, max(2 * block, 6)
    data = np.random.default_rng(1).integers(0, 256, rows * columns // block * block_bytes, dtype=np.uint8)
    entry = TensorEntry("w", kind, (rows, columns), data)
    whole = dequantize(entry)
    for wanted in ([(3, 9)], [(0, 1), (299, 580), (599, 600)]):
        some = np.concatenate([whole[first:end] for first, end in wanted])
        assert np.array_equal(dequantize(entry, wanted), some, equal_nan=True)
        cut = np.concatenate([some[:, 1:3], some[:, 5:]], axis=1)
        assert np.array_equal(dequantize(entry, wanted, [(1, 3), (5, columns)]), cut, equal_nan=True)
    assert np.array_equal(dequantize(entry, None, [(2, 4)]), whole[:, 2:4], equal_nan=True)


def test_rows_of_rotary_heads_are_cut_after_they_are_in_order() -> None:
    data = np.arange(24 * 2, dtype=np.float32).view(np.uint8)
    entry = TensorEntry("q", "F32", (24, 2), data, rotary_heads=3)
    whole = dequantize(entry)
    for first, end in ((0, 8), (8, 24), (3, 21), (23, 24)):
        assert np.array_equal(dequantize(entry, [(first, end)]), whole[first:end])
    bias = TensorEntry("b", "F32", (24,), data[: 24 * 4], rotary_heads=3)
    assert np.array_equal(dequantize(bias, [(5, 11)]), dequantize(bias)[5:11])


@pytest.mark.parametrize("shards", [1, 3])
def test_folder(tmp_path: Path, shards: int) -> None:
    entries = open_weights(tiny_folder(tmp_path / "m", shards=shards))
    expected = hf_weights()
    assert set(entries) == set(expected)
    for name, array in expected.items():
        assert entries[name].dtype == "F32" and np.array_equal(dequantize(entries[name]), array)
        assert not entries[name].data.flags.owndata


def test_a_file_beside_model_safetensors_is_not_read(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m")
    save_file({"tok_embeddings.weight": np.zeros(4, np.float32)}, source.path / "consolidated.safetensors")
    assert "tok_embeddings.weight" not in open_weights(source)


def test_dequantised_arrays_are_ones_own(tmp_path: Path) -> None:
    """They may be written and outlive the file, whatever the stored dtype is."""
    for entry in open_weights(tiny_folder(tmp_path / "m")).values():
        array = dequantize(entry)
        assert array.flags.writeable and array.flags.c_contiguous and array.dtype == np.float32
        array += 1


@pytest.mark.parametrize("dtype", [name for name in NUMBERS.values() if name not in ("F32", "F16", "BF16")])
def test_every_quantised_type_agrees_with_the_library(dtype: str) -> None:
    """Random bytes, infinite and undefined scales among them; the last of the pieces is not a full one."""
    number = next(number for number, name in NUMBERS.items() if name == dtype)
    _, block, block_bytes = GGML_TYPES[number]
    data = np.random.default_rng(number).integers(0, 256, (5000, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType(number))
    mine = dequantize(TensorEntry("x", dtype, (2500, 2 * block), data.reshape(-1)))
    assert mine.shape == (2500, 2 * block) and mine.dtype == np.float32
    assert np.array_equal(mine.reshape(-1), expected.reshape(-1), equal_nan=True)


def test_half_precision_values() -> None:
    values = np.array([0.0, -1.5, 65504.0, 2.0**-24, np.inf], np.float16)
    assert np.array_equal(dequantize(TensorEntry("x", "F16", (5,), values.view(np.uint8))), values.astype(np.float32))
    wide = np.array([0.0, -1.5, 1e38, 1.1754944e-38, -np.inf], np.float32).view(np.uint32) >> 16
    expected = (wide << 16).astype(np.uint32).view(np.float32)
    assert np.array_equal(dequantize(TensorEntry("x", "BF16", (5,), wide.astype("<u2").view(np.uint8))), expected)


@pytest.mark.parametrize("heads", [3, 0, 2**31])
def test_rows_that_are_no_heads_are_refused(tmp_path: Path, heads: int) -> None:
    with pytest.raises(ConfigError, match="heads"):
        open_weights(tiny_gguf(tmp_path / "bad.gguf", {"llama.attention.head_count": heads}))


def digest_after(source: ModelSource, path: Path, place: int) -> str:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    try:
        return source_digest(source)
    finally:
        data[place] ^= 1
        path.write_bytes(data)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bit_changes_the_digest(tmp_path: Path, data: st.DataObject) -> None:
    folder, file = tiny_folder(tmp_path / "m", shards=2), tiny_gguf(tmp_path / "tiny.gguf")
    for source in (folder, file):
        paths = sorted(source.path.iterdir()) if source.kind == "folder" else [source.path]
        path = data.draw(st.sampled_from(paths))
        before = source_digest(source)
        place = data.draw(st.integers(0, path.stat().st_size - 1))
        if path.name != "model.safetensors.index.json":  # damaged, it names other files
            assert digest_after(source, path, place) != before
        assert source_digest(source) == before


def test_the_digest_is_of_content_and_not_of_the_place(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "tiny.gguf")
    copy = tmp_path / "elsewhere" / "other.gguf"
    copy.parent.mkdir()
    copy.write_bytes(source.path.read_bytes())
    os.utime(copy, (1, 1))
    assert source_digest(ModelSource("gguf", copy, "other")) == source_digest(source)
    assert len(source_digest(source)) == 32


def test_large_models_are_sampled(tmp_path: Path, monkeypatch: Any) -> None:
    """With the limits lowered: head and samples count, bytes between them do not, the size does."""
    path = tmp_path / "large.gguf"
    path.write_bytes(bytes(100_000))
    source = ModelSource("gguf", path, "large")
    for name, value in {"_HASH_WHOLE_BYTES": 50_000, "_HASH_HEAD_BYTES": 20_000, "_STRIDE_BYTES": 10_000}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 100)
    before = source_digest(source)
    for place, counts in {0: True, 19_999: True, 20_050: True, 20_150: False, 90_099: True, 99_999: False}.items():
        assert (digest_after(source, path, place) != before) == counts, place
    path.write_bytes(bytes(100_001))
    assert source_digest(source) != before


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 1}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": "missing.safetensors"}}',
        '{"weight_map": {"a": "../outside.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "\\u0000"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "."}}',
    ],
)
def test_a_damaged_index_is_a_config_error(tmp_path: Path, index: str) -> None:
    source = tiny_folder(tmp_path / "m", shards=2)
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "outside.safetensors")
    (source.path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError) as caught:
        open_weights(source)
    assert "\n" not in str(caught.value)


def edit_index(source: ModelSource, edit: Callable[[dict[str, str]], object]) -> str:
    """What is said of a folder of three shards whose index is changed."""
    index = source.path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    edit(values["weight_map"])
    index.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        open_weights(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
NORM = "model.norm.weight"


def test_a_missing_shard_is_named_with_a_tensor_of_it(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m", shards=3)
    (source.path / SECOND).unlink()
    message = edit_index(source, lambda shards: None)
    assert f"{SECOND}', which should hold tensor '{NORM}', is missing" in message and "more" not in message
    (source.path / THIRD).unlink()
    assert message + ", and so are 1 more of its files" == edit_index(source, lambda shards: None)


def test_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    message = edit_index(tiny_folder(tmp_path / "m", shards=3), lambda shards: shards.update({NORM: FIRST}))
    assert f"{FIRST} lacks tensor '{NORM}'" in message
    message = edit_index(tiny_folder(tmp_path / "n", shards=3), lambda shards: shards.update({"model.x": THIRD}))
    assert f"{THIRD} lacks tensor 'model.x'" in message


def test_a_tensor_in_two_files_is_read_from_that_which_the_index_names(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m", shards=3)
    third = load_file(source.path / THIRD)
    save_file({**third, NORM: np.full(64, 7, np.float32)}, source.path / THIRD)
    assert np.array_equal(dequantize(open_weights(source)[NORM]), hf_weights()[NORM])
    message = edit_index(source, lambda shards: shards.pop(NORM))
    assert f"'{NORM}' is both in " in message and SECOND in message and THIRD in message


def test_a_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "m", shards=3)
    (source.path / "model.safetensors.index.json").unlink()
    assert len(open_weights(source)) == len(hf_weights())
    save_file({NORM: np.zeros(64, np.float32)}, source.path / "z.safetensors")
    with pytest.raises(ConfigError, match="is both in"):
        open_weights(source)


def safetensors_file(path: Path, header: Any, data: bytes = bytes(16)) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def info(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_a_sound_safetensors_file_with_metadata(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, **info()}, bytes(range(16)))
    dtype, shape, data = read_safetensors(path)["a"]
    assert (dtype, shape, bytes(data)) == ("F32", (2, 2), bytes(range(16)))
    assert np.array_equal(load_file(path)["a"].view(np.uint8).reshape(-1), data)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        {"a": 1},
        {"a": {}},
        info(dtype="I64"),
        info(dtype=["F32"]),
        info(shape=[-2, -2]),
        info(shape=[2.0, 2]),
        info(shape=4),
        info(shape=[2, float("inf")]),
        info(offsets=[0, 17]),
        info(offsets=[0, 8]),
        info(offsets=[-16, 0]),
        info(offsets=[16, 0]),
        info(offsets=[0]),
        info(offsets=[8, 24]),
        info(offsets=None),
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_damaged_safetensors_header_is_a_config_error(tmp_path: Path, header: Any) -> None:
    with pytest.raises(ConfigError, match=r"a\.safetensors") as caught:
        read_safetensors(safetensors_file(tmp_path / "a.safetensors", header))
    assert "\n" not in str(caught.value)


def tensors(**offsets: tuple[int, int]) -> dict[str, Any]:
    """float32 tensors at these offsets."""
    return {
        name: {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        for name, (start, end) in offsets.items()
    }


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (tensors(a=(0, 8), b=(4, 16)), "tensor 'b' overlaps with 'a'"),
        (tensors(b=(0, 16), a=(0, 16)), "tensor 'b' overlaps with 'a'"),
        (tensors(a=(0, 16), b=(4, 8)), "tensor 'b' overlaps with 'a'"),
        (tensors(a=(0, 4), b=(8, 16)), "4 bytes before tensor 'b' belong to none"),
        (tensors(a=(4, 16)), "4 bytes before tensor 'a' belong to none"),
        (tensors(a=(0, 12)), "4 bytes after the last tensor belong to none"),
        ({}, "16 bytes after the last tensor belong to none"),
        (
            tensors(a=(0, 8), b=(8, 20)),
            "tensor 'b': it lies outside the file: 20 bytes of data are needed, 16 are there",
        ),
        (info(offsets=[16, 0]), "tensor 'a': its bytes end at 0, before they start at 16"),
        (info(dtype="F16"), r"tensor 'a': F16 values of shape \[2, 2\] take 8 bytes, not 16"),
        (info(dtype="I64"), "tensor 'a': dtype 'I64' is not supported"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "tensor 'a': data_offsets is missing"),
        (info(shape=[1] * 8 + [4]), "tensor 'a': its shape is .* expected at most 8 lengths"),
        (info(shape=[1] * 100_000), "tensor 'a': its shape is .* expected at most 8 lengths"),
        (info(shape=[0, 2**64], offsets=[0, 0]), "tensor 'a': 18446744073709551616 where a size belongs"),
        (info(shape=[0, 2**40, 2**40], offsets=[0, 0]), "tensor 'a': its shape is .* which cannot be"),
        (info(shape=[2**59, 2**59], offsets=[0, 16]), "tensor 'a': its shape is .* which cannot be"),
        (b'{"a":1,"a":2}', "two entries named 'a'"),
        (b'{"a":{"shape":[4],"dtype":"F32","dtype":"F32"}}', "two entries named 'dtype'"),
        ("text", "not a JSON object"),
        (json.dumps(info()).encode("utf-16"), "utf-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_breaks_the_rules_names_the_tensor(tmp_path: Path, header: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        read_safetensors(safetensors_file(tmp_path / "a.safetensors", header))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_tensors_without_values_take_no_place(tmp_path: Path) -> None:
    header = {**tensors(a=(0, 8), b=(8, 16), c=(8, 8), d=(0, 0), e=(16, 16))}
    assert set(read_safetensors(safetensors_file(tmp_path / "a.safetensors", header))) == set("abcde")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_safetensors_files_are_never_anything_but_config_errors(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": np.arange(8, dtype=np.float32), "b": np.ones((2, 3), np.float16)}, path)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(ConfigError):
            read_safetensors(path)
        return
    place = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=6))
    whole[place : place + len(junk)] = junk
    path.write_bytes(whole)
    try:
        read_safetensors(path)
    except ConfigError as error:
        assert len(str(error)) < 2000
