"""Parts put together are the whole, in every family; a part's file serves its stages; nothing else is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evensong.distributed.grid import RankGrid
from evensong.distributed.split import Share, plan_shares, whole_share
from evensong.models import loader
from evensong.models.check import check_model
from evensong.models.loader import TensorReader
from evensong.protocol.errors import ConfigError
from evensong.sources.dequant import dequantize
from evensong.sources.model_config import load_model_description
from evensong.sources.model_description import ModelDescription
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import Weights, open_weights, source_digest
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama
from evensong.worker import native_model
from evensong.worker.device import ModelFiles
from evensong.worker.native_model import NativeModel, load_native
from tests.unit.models.random_models import random_model
from tests.unit.models.test_families import CASES, CONFIGS


def opened(folder: Path) -> tuple[ModelDescription, Weights]:
    source = resolve_model(str(folder), progress=False)
    return load_model_description(source), open_weights(source)


def covered(weights: Weights, shares: tuple[Share, ...], description: ModelDescription) -> dict[str, np.ndarray]:
    """What the shares read, each value where it belongs; NaN where nobody reads. Shared values are equal."""
    found: dict[str, np.ndarray] = {}
    for share in shares:
        spans = check_model(description, weights, share)
        with TensorReader(weights, spans) as read:
            for name, wanted in spans.items():
                whole = found.setdefault(name, np.full(weights[name].shape, np.nan, np.float32))
                place = np.ix_(*(np.concatenate([np.arange(*r) for r in span.ranges]) for span in wanted))
                values = read(name, wanted)
                assert values.shape == tuple(span.size for span in wanted)
                known = whole[place]
                assert np.array_equal(np.where(np.isnan(known), values, known), values)
                whole[place] = values
    return found


@pytest.mark.parametrize(("family", "case"), CASES)
@pytest.mark.parametrize("grid", [RankGrid(1, 2), RankGrid(2, 1), RankGrid(4, 1), RankGrid(6, 3)], ids=str)
def test_parts_put_together_are_the_whole_tensors(family: str, case: str, grid: RankGrid, tmp_path: Path) -> None:
    random_model(CONFIGS[family][case](), tmp_path)
    description, weights = opened(tmp_path)
    found = covered(weights, plan_shares(description, grid), description)
    assert set(found) == set(weights)
    for name, values in found.items():
        assert np.array_equal(values, dequantize(weights[name])), name


def test_the_whole_model_reads_everything_once(tmp_path: Path) -> None:
    description, weights = opened(write_tiny_llama(tmp_path))
    spans = check_model(description, weights, whole_share(description))
    assert set(spans) == set(weights) and all(span.is_whole for of in spans.values() for span in of)


def test_only_what_a_rank_has_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description, weights = opened(write_tiny_llama(tmp_path, TinyLlama(num_layers=3)))
    read: list[tuple[int, ...]] = []

    def noted(*args: Any) -> np.ndarray:
        values = dequantize(*args)
        read.append(values.shape)
        return values

    monkeypatch.setattr(loader, "dequantize", noted)
    share = plan_shares(description, RankGrid(2, 3))[3]
    covered(weights, (share,), description)
    sizes = sum(int(np.prod(shape)) for shape in read)
    layer = 64 * (64 + 2 * 32 + 64 + 3 * 128)
    assert sizes == layer // 2 + 2 * 64  # half of a layer's products, and its norms


def test_another_share_of_a_tensor_that_was_read_ahead(tmp_path: Path) -> None:
    description, weights = opened(write_tiny_llama(tmp_path))
    one, other = (check_model(description, weights, share) for share in plan_shares(description, RankGrid(2)))
    name = "model.layers.0.mlp.down_proj.weight"
    with TensorReader(weights, one) as read:
        read("model.embed_tokens.weight", one["model.embed_tokens.weight"])
        assert np.array_equal(read(name, other[name]), dequantize(weights[name])[:, 64:])
        assert np.array_equal(read(name, one[name]), dequantize(weights[name])[:, :64])


@pytest.mark.parametrize("index", [0, 3])
def test_a_rank_refuses_a_model_whose_other_layers_are_not_there(tmp_path: Path, index: int) -> None:
    description, weights = opened(write_tiny_llama(tmp_path))
    share = plan_shares(description, RankGrid(2, 2))[index]
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        with pytest.raises(ConfigError, match=name):
            check_model(description, Weights({n: e for n, e in weights.items() if n != name}), share)
    surplus = Weights({**weights, "model.layers.0.mlp.up_proj.bias": weights["model.norm.weight"]})
    with pytest.raises(ConfigError, match=r"up_proj\.bias"):
        check_model(description, surplus, share)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Share]]:
    """An empty cache, and the shares that are packed into it."""
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path / "cache"))
    packed: list[Share] = []
    real = native_model.PackingBuilder

    def noted(share: Share, *args: Any) -> Any:
        packed.append(share)
        return real(share, *args)

    monkeypatch.setattr(native_model, "PackingBuilder", noted)
    yield packed


def load_rank(folder: Path, grid: RankGrid, index: int) -> NativeModel:
    source = resolve_model(str(folder), progress=False)
    description = load_model_description(source)
    files = ModelFiles(source, description, lambda: source_digest(source))
    return load_native(files, plan_shares(description, grid)[index], "portable", "float32", 1, show=False)


def test_stages_share_their_parts_file_and_read_their_own_layers(tmp_path: Path, packings: list[Share]) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    models = [load_rank(folder, RankGrid(2, 2), index) for index in range(4)]
    assert len(packings) == 2 and all(share.layers == range(2) for share in packings)
    paths = [model.packed.path for model in models]
    assert paths[0] == paths[2] != paths[1] == paths[3]
    load_rank(folder, RankGrid(), 0)
    load_rank(folder, RankGrid(1, 2), 1)
    assert len(packings) == 3  # one file for any number of stages
    # A byte of the first stage's layer is another: that stage packs anew, the second one never saw it.
    assert paths[0] is not None
    entry = models[0].packed.entry("model.layers.0.mlp.down_proj")
    with open(paths[0], "r+b") as file:
        at = paths[0].read_bytes().index(entry.data.tobytes())
        file.seek(at)
        file.write(bytes([entry.data[0] ^ 1]))
    load_rank(folder, RankGrid(2, 2), 2)
    assert len(packings) == 3
    load_rank(folder, RankGrid(2, 2), 0)
    assert len(packings) == 4


def test_stages_that_start_at_once_pack_once(tmp_path: Path, packings: list[Share]) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    found: list[NativeModel] = []
    starts = [
        threading.Thread(target=lambda i=index: found.append(load_rank(folder, RankGrid(1, 2), i))) for index in (0, 1)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(found) == 2 and len(packings) == 1


def test_the_file_of_a_whole_model_is_the_one_it_always_was(tmp_path: Path, packings: list[Share]) -> None:
    """Its key holds nothing of ranks: caches stay valid."""
    folder = write_tiny_llama(tmp_path / "model")
    whole, part = load_rank(folder, RankGrid(), 0), load_rank(folder, RankGrid(2), 1)
    source = resolve_model(str(folder), progress=False)
    parts = {
        "model": source_digest(source),
        "isa": "portable",
        "build": native_model.extension().BUILD,
        "stored": "float32",
    }
    assert whole.packed.path == native_model.packed_path(source.name, native_model.packed_key(parts))
    assert part.packed.path is not None and ".2of2-" in part.packed.path.name
