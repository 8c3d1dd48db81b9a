"""The worker's own duties: device, dtype, threads, limits, memory, fingerprint parts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from evensong import _native
from evensong.config.sections import CacheConfig, EngineConfig, ModelConfig, ObservabilityConfig
from evensong.distributed.grid import RankGrid
from evensong.kernels.cpu import native
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.output import TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.tiny_models import NUM_TOKENS, TinyLlama, write_tiny_llama
from evensong.utils.machine import compute_threads, usable_cpus
from evensong.utils.progress import TICKS_WORD, ProgressPage
from evensong.worker import devices
from evensong.worker.device import DeviceSettings
from evensong.worker.torch_device import pick_torch_device
from evensong.worker.worker import Worker, run_dtype
from tests.unit.worker.worlds import Job, World, make_worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_what_it_learns_from_the_model(folder: Path) -> None:
    worker = make_worker(folder)
    limits = worker.get_model_limits()
    assert (limits.max_position_embeddings, limits.vocab_size, limits.device) == (512, NUM_TOKENS, "cpu")
    specs = worker.get_kv_cache_specs()
    assert [spec.layer for spec in specs] == [0, 1]
    assert specs[0].bytes_per_token == 2 * 2 * 16 * 4
    assert worker.determine_available_memory() > 0
    assert worker.get_rank() == 0


@pytest.mark.parametrize("max_model_len", [1, 16, 63, 64, 300])
def test_the_rate_is_measured_within_the_fitted_length(folder: Path, max_model_len: int) -> None:
    assert make_worker(folder, max_model_len=max_model_len).measure_token_rate() > 0


def test_a_pool_smaller_than_the_probe(folder: Path) -> None:
    worker = Worker(EngineConfig(model=ModelConfig(model=str(folder), device="cpu")))
    worker.initialize_from_config(KVCacheConfig(2, 1), 2)
    assert worker.measure_token_rate() > 0


@pytest.mark.parametrize("asked", [None, 1 << 20])
def test_memory_is_taken_ahead_only_where_it_was_asked_for(folder: Path, asked: int | None) -> None:
    settings = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu"), cache=CacheConfig(kv_cache_memory_bytes=asked)
    )
    worker = Worker(settings)
    assert not worker.use_idle_time()
    worker.initialize_from_config(KVCacheConfig(64, 16), 512)
    touched = worker.use_idle_time()
    assert touched is (asked is not None)
    assert not (touched and [worker.use_idle_time() for _ in range(4)][-1])


def test_fingerprint_parts_are_plain_and_tell_models_apart(folder: Path, tmp_path: Path) -> None:
    parts = make_worker(folder).describe()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parts), type=dict[str, str]) == parts
    assert make_worker(folder).describe() == parts
    other = make_worker(write_tiny_llama(tmp_path, TinyLlama(seed=1))).describe()
    assert {key for key in parts if parts[key] != other[key]} == {"weights"}
    rounded = make_worker(folder, dtype="bfloat16").describe()
    changed = {key for key in parts if parts[key] != rounded[key]}
    assert changed == {"mode", "kv_dtype"}


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_shows_the_loading_where_it_is_wanted(
    folder: Path, shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path))  # where nothing is packed yet
    model = ModelConfig(model=str(folder), device="cpu")
    Worker(EngineConfig(model=model, observability=ObservabilityConfig(use_tqdm_on_load=shown)))
    assert ("packing weights" in capsys.readouterr().err) == shown


def test_steps_before_the_cache_are_a_bug(folder: Path) -> None:
    worker = Worker(EngineConfig(model=ModelConfig(model=str(folder), device="cpu")))
    with pytest.raises(AssertionError, match="initialize_from_config"):
        worker.sample_tokens(None)
        worker.take_output()


def test_a_rank_says_how_many_share_a_layer(folder: Path) -> None:
    """Stages are no part of the fingerprint."""
    config = EngineConfig(model=ModelConfig(model=str(folder), device="cpu"))
    alone = Worker(config).describe()
    assert alone["tensor_parallel_size"] == "1" and Worker(config, RankGrid(1, 2).rank(1)).describe() == alone
    second = Worker(config, RankGrid(2, 2).rank(3))
    assert second.get_rank() == 3 and [spec.layer for spec in second.get_kv_cache_specs()] == [1]
    assert second.describe() == alone | {"tensor_parallel_size": "2"}
    with pytest.raises(ConfigError, match="1 to 4 can"):
        Worker(config, RankGrid(5).rank(0))


def test_run_dtypes() -> None:
    for stored in ("float32", "bfloat16", "float16"):
        assert run_dtype("auto", stored) == stored
        assert run_dtype("float16", stored) == "float16"


def test_float16_on_cpu_is_bfloat16(tmp_path: Path) -> None:
    """Both as the checkpoint's dtype and as the one asked for: one fingerprint, since the bits are the same."""
    folder = write_tiny_llama(tmp_path / "half", TinyLlama(dtype="float16"))
    parts = [
        Worker(EngineConfig(model=ModelConfig(model=str(folder), device="cpu", dtype=dtype))).describe()
        for dtype in ("auto", "float16", "bfloat16")
    ]
    assert parts[0] == parts[1] == parts[2] and parts[0]["kv_dtype"] == "bfloat16"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_torch_device("auto").type == pick_torch_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device"):
        devices.make_device(DeviceSettings("cuda", "bfloat16"))
    # A driver without a device it can use: back to the CPU, natively.
    monkeypatch.setattr(devices, "may_have_cuda", lambda: True)
    assert type(devices.make_device(DeviceSettings("auto", "bfloat16"))).__name__ == "NativeDevice"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_torch_device("auto").type == "cuda" and pick_torch_device("cpu").type == "cpu"


def test_without_the_extension_torch_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", ImportError("not built"))
    worker = make_worker(folder)
    assert worker.describe()["kernel_build"].startswith("torch ")
    job = Job("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    World(worker).run([job], 4)
    assert len(job.output) == 4


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_each_instruction_set_has_its_own_fingerprint(folder: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert make_worker(folder).describe()["isa"] == isa


def test_an_instruction_set_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"avx1024.*usable: .*portable"):
        make_worker(folder)


@pytest.mark.parametrize("asked, expected", [("1", 1), ("", None), ("0", None), ("many", None), ("1000000", None)])
def test_threads(monkeypatch: pytest.MonkeyPatch, asked: str, expected: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert compute_threads() == (usable_cpus() if expected is None else expected)


def test_after_a_sleep_the_bits_are_the_same(folder: Path) -> None:
    worker = make_worker(folder)
    prompt = list(range(3, 40))

    def answer(name: str) -> tuple[list[int], list[TokenLogprobs]]:
        job = Job(name, prompt, SamplingParams(seed=7, temperature=1.0, max_tokens=8, logprobs=3))
        world.run([job], 8)
        return job.output, job.logprobs

    world = World(worker)
    parts, before = worker.describe(), answer("before")
    for part in ("kv_cache", "weights"):
        worker.sleep(part)
    with pytest.raises(AssertionError, match="asleep"):
        worker.get_kv_cache_specs()
    for part in ("weights", "kv_cache"):
        worker.wake_up(part)
    assert worker.describe() == parts and answer("after") == before


def test_other_files_do_not_wake_up(tmp_path: Path) -> None:
    worker = make_worker(write_tiny_llama(tmp_path))
    worker.sleep("weights")
    write_tiny_llama(tmp_path, TinyLlama(seed=1))
    with pytest.raises(ConfigError, match="not those"):
        worker.wake_up("weights")
    write_tiny_llama(tmp_path)
    worker.wake_up("weights")
    assert worker.get_kv_cache_specs()


def test_a_part_of_a_trace_is_written_where_a_folder_was_given(folder: Path, tmp_path: Path) -> None:
    worker = make_worker(folder, torch_profiler_dir=str(tmp_path / "traces"))
    part = Path(worker.profile("start", "mine") or "")
    assert part.parent == tmp_path / "traces" and not part.exists()
    worker.measure_token_rate()
    worker.profile("stop")
    events = json.loads(f"[{part.read_text()}]")
    assert {event["name"] for event in events} >= {"embedding", "rms_norm", "linear", "rope_kv", "attention"}
    (process,) = [event for event in events if event["name"] == "process_name"]
    assert (process["pid"], process["args"]) == (1, {"name": "worker-0.0"})


def test_every_layer_is_progress(folder: Path) -> None:
    worker, page = make_worker(folder), ProgressPage()
    worker.watch_progress(page)
    World(worker).run([Job("a", [3, 4, 5], SamplingParams(seed=1))], 2)
    assert page.words[TICKS_WORD] >= 2 * len(worker.get_kv_cache_specs())
    assert page.seconds_still < 60
