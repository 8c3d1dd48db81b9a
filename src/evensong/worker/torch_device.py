"""TorchDevice: torch's ops, on CUDA, or on a CPU without native kernels."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from evensong.distributed.torch_collectives import TorchPeers
from evensong.kernels.attention import AttentionPlan
from evensong.kernels.dispatch import OpSet, cpu_multiplies_bfloat16, describe_kernels, ops_for
from evensong.kernels.mode import NumericMode, numeric_mode
from evensong.layers.torch_builder import TorchBuilder, torch_dtype
from evensong.layers.torch_step import RotaryTables, StepInputs, TorchStep
from evensong.models.base import CausalLM
from evensong.models.check import check_model
from evensong.models.loader import TensorReader, build_model
from evensong.observe.chrome_trace import PartWriter
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.sampling.row import SamplingRow
from evensong.sources.model_description import ModelDescription
from evensong.sources.weights import open_weights
from evensong.utils.machine import available_memory_bytes, compute_threads
from evensong.utils.progress import ProgressPage
from evensong.worker.batch import Batch
from evensong.worker.device import (
    PROBE,
    Device,
    DeviceSettings,
    DeviceStep,
    ModelFiles,
    StepMark,
)
from evensong.worker.kv_memory import HostKV, copy_rows
from evensong.worker.layer_views import LayerViews
from evensong.worker.torch_links import TIMEOUT, TorchLinks, torch_links
from evensong.worker.torch_run import TorchRun
from evensong.worker.torch_trace import TorchTrace

# Share of a CUDA device's free memory that the cache may take.
CUDA_POOL_SHARE = 0.85


class _Watched(dict[int, torch.Tensor]):
    """The KV caches by layer: whoever takes the next layer's comes forward."""

    def __init__(self, caches: Mapping[int, torch.Tensor], tick: Callable[[], None]) -> None:
        super().__init__(caches)
        self._tick = tick

    def __getitem__(self, layer: int) -> torch.Tensor:
        self._tick()
        return super().__getitem__(layer)


class TorchDevice(Device):
    """`ops` and `mode`, if given, replace what the machine would choose: for tests."""

    def __init__(self, settings: DeviceSettings, *, ops: OpSet | None = None, mode: NumericMode | None = None) -> None:
        self._settings = settings
        self._torch = pick_torch_device(settings.device)
        self.kind = self._torch.type
        if self.kind == "cpu":
            # Threads belong to the calling thread in OpenMP, and this is the one that runs the model.
            torch.set_num_threads(len(settings.processors) if settings.processors else compute_threads())
        multiplies = self.kind != "cpu" or cpu_multiplies_bfloat16()
        own = numeric_mode(settings.dtype, self.kind, multiplies_bfloat16=multiplies)
        self.mode = (mode or own).with_kv(settings.kv_dtype)
        self._ops = ops or ops_for(self._torch)
        self._loaded: _Loaded | None = None
        self._links: TorchLinks | None = None
        self._kv: _TorchKV | None = None
        self._views: LayerViews | None = None
        self._caches: dict[int, torch.Tensor] = {}
        self._num_token_ids = 0
        self._trace = TorchTrace()

    def load(self, files: ModelFiles, show: bool) -> None:
        description, weights = files.description, open_weights(files.source)
        share = self._settings.share(description)
        spans = check_model(description, weights, share)
        with (
            torch.inference_mode(),
            tqdm(total=len(spans), desc="loading weights", unit="tensor", disable=not show, leave=False) as bar,
            TensorReader(weights, spans, lambda: bar.update(1)) as read,
        ):
            builder = TorchBuilder(share, read, self._ops, self.mode, self._torch)
            self._loaded = _Loaded(description, build_model(description, builder), builder)

    def unload(self) -> None:
        self._loaded = None
        gc.collect()

    def kv_specs(self) -> list[LayerKVSpec]:
        return self._model.model.kv_specs(self.mode.kv)

    def available_memory(self) -> int:
        if self.kind == "cpu":
            return available_memory_bytes()
        free, _ = torch.cuda.mem_get_info(self._torch)
        return int(free * CUDA_POOL_SHARE)

    def prepare(self, kv_cache: KVCacheConfig, max_model_len: int, num_token_ids: int) -> None:
        if self._kv is None:
            self._links = torch_links(self._settings.links_fd, self._settings.rank, kv_cache, self._torch)
            self._kv = _TorchKV(self.kv_specs(), kv_cache, self.mode, self._torch)
            self._caches = {spec.layer: cache for spec, cache in zip(self.kv_specs(), self._kv.caches, strict=True)}
        if self._links is not None:
            self._model.trials = self._model.trials.of_all(self._links.peers)
        self._views = LayerViews(self.kv_specs(), kv_cache)
        self._num_token_ids = num_token_ids
        description = self._model.description
        self._model.tables = RotaryTables(description.rotary_dim, description.layer_ropes, max_model_len, self._torch)

    @torch.inference_mode()
    def start(self, batch: Batch, rows: Sequence[SamplingRow], mark: StepMark = PROBE) -> DeviceStep:
        assert self._views is not None, "prepare comes first"
        self._trace.step_begins(mark.step_id, len(batch.token_ids))
        self._copy_blocks(batch)
        token_ids = batch.token_ids
        if self._links is not None:
            token_ids = self._links.tokens.resolve(token_ids, mark.feed_after, TIMEOUT)
        num_slots = next(iter(self._caches.values())).shape[0] - 1
        metadata = self._views.metadata(batch, num_slots, self._torch)
        positions = torch.from_numpy(batch.positions()).to(self._torch)
        inputs = StepInputs(
            token_ids=torch.from_numpy(token_ids).to(self._torch),
            cos_sin=self._model.tables.at(positions, torch_dtype(self.mode.compute)),
            caches=self._caches,
            metadata=metadata,
        )
        share = self._model.share
        peers = None if self._links is None else self._links.peers
        step = TorchStep(self._ops, self.mode, self._model.plan, inputs, share.vocabulary_sizes, peers)
        model = self._model.model
        hidden = model.forward(step)
        tokens = None if self._links is None else self._links.tokens
        run = TorchRun(model, step, hidden, batch.sample_rows, rows, self._num_token_ids, share.rank, mark, tokens)
        self._trace.step_ends()
        return run

    def set_doorbell(self, fd: int) -> None:
        """Nobody needs to be woken: `start` waits."""

    def describe(self) -> dict[str, str]:
        return {
            "trial_results": self._model.trials.digest(),
            "threads": self._model.trials.all_threads() if self.kind == "cpu" else "1",
            **describe_kernels(self._torch),
        }

    def watch_progress(self, page: ProgressPage) -> None:
        self._caches = _Watched(self._caches, page.tick)

    def start_trace(self) -> Callable[[PartWriter], None]:
        self._trace.start(self.kind)
        return self._trace.stop

    @property
    def _model(self) -> _Loaded:
        assert self._loaded is not None, "the weights are asleep"
        return self._loaded


@dataclass(frozen=True)
class Trials:
    """What trial products gave, and on how many threads: of a rank, or of all ranks of a replica.

    In a replica's fingerprint it does not count which rank had a trial, or how many had it: stages change no bit.
    """

    results: Sequence[str]
    threads: Sequence[int]

    def of_all(self, peers: TorchPeers) -> Trials:
        """Those of all ranks together, which call this at the same time."""
        told = [json.loads(text) for text in peers.tell_all("trials", json.dumps([self.results, self.threads]))]
        return Trials([one for results, _ in told for one in results], [one for _, threads in told for one in threads])

    def digest(self) -> str:
        """A digest of the results."""
        return hashlib.blake2b("".join(sorted(set(self.results))).encode(), digest_size=16).hexdigest()

    def all_threads(self) -> str:
        """The numbers of threads that ranks have."""
        return ", ".join(map(str, sorted(set(self.threads))))


class _Loaded:
    """A model with its weights, and what depends on them."""

    tables: RotaryTables

    def __init__(self, description: ModelDescription, model: CausalLM, builder: TorchBuilder) -> None:
        self.description = description
        self.model = model
        self.share = builder.share
        self.plan: AttentionPlan = builder.attention_plan(
            builder.share.heads.num_heads, builder.share.heads.num_kv_heads, description.head_dim
        )
        self.trials = Trials(builder.trial_results(), [torch.get_num_threads()])


class _TorchKV:
    """The KV cache as tensors: views of host memory, or memory of the device."""

    def __init__(
        self, specs: Sequence[LayerKVSpec], kv_cache: KVCacheConfig, mode: NumericMode, device: torch.device
    ) -> None:
        self._host = HostKV(specs, kv_cache, mode.kv) if device.type == "cpu" else None
        self._block_size = kv_cache.block_size
        dtype = torch_dtype(mode.kv)
        if self._host is not None:
            self.caches = [torch.from_numpy(array).view(dtype) for array in self._host.arrays]
        else:
            self.caches = HostKV.shared(specs, kv_cache, lambda rows, width: _on_device(rows, width, dtype, device))
        self._sizes = [cache.untyped_storage().nbytes() for cache in self.caches]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As HostKV.copy_blocks."""
        if self._host is not None:
            self._host.copy_blocks(pairs)
        else:
            copy_rows(self.caches, pairs, self._block_size)

    def touch(self) -> bool:
        """As HostKV.touch."""
        return self._host is not None and self._host.touch()

    def release(self) -> None:
        """Gives the memory back; contents are lost."""
        if self._host is not None:
            self._host.release()
            return
        for cache in self.caches:
            cache.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Takes it again. A device that lacks the memory raises torch's error."""
        if self._host is not None:
            self._host.restore()
            return
        for cache, size in zip(self.caches, self._sizes, strict=True):
            cache.untyped_storage().resize_(size)
            cache[-1].zero_()


def _on_device(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    cache = torch.empty(rows, width, dtype=dtype, device=device)
    cache[-1].zero_()
    return cache


def pick_torch_device(asked: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here. Raises ConfigError when there is none."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device can be used here")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")
