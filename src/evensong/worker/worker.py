"""Worker: one rank's device with its model, KV cache and requests. The executor loads this class by name."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from evensong.config.sections import EngineConfig
from evensong.distributed.grid import ALONE, Rank
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.sampling.processor import ProcessorConfig
from evensong.sampling.processors import load_processors
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer
from evensong.sources.weights import source_digest
from evensong.utils.machine import give_back_free_memory
from evensong.utils.progress import ProgressPage
from evensong.worker.device import PROBE_TOKENS, DeviceSettings, ModelFiles
from evensong.worker.devices import make_device
from evensong.worker.profiler import Profiler
from evensong.worker.runner import Runner
from evensong.worker.stepping import SteppingWorker


class Worker(SteppingWorker):
    """Construction picks the device and loads the weights; `initialize_from_config` allocates the KV cache.

    `links_fd`: the memory that the ranks of a replica share, where there are several; `processors`: this rank's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: Rank = ALONE,
        links_fd: int | None = None,
        processors: tuple[int, ...] | None = None,
    ) -> None:
        model = config.model
        self._rank = rank
        source = resolve_model(model.model, revision=model.revision, progress=False, fetched=True)
        self._source = source
        self._description = load_model_description(source)
        # Both only read files, beside the loading of the weights.
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="files") as files:
            digest = files.submit(source_digest, source)
            tokenizer = files.submit(load_tokenizer, source)
            self._device = make_device(
                DeviceSettings(
                    device=model.device,
                    dtype=run_dtype(model.dtype, self._description.torch_dtype),
                    kv_dtype=config.cache.kv_cache_dtype,
                    enforce_eager=model.enforce_eager,
                    rank=rank,
                    links_fd=links_fd,
                    pipeline_layers=config.parallel.pipeline_layers,
                    processors=processors,
                )
            )
            show = config.observability.use_tqdm_on_load
            self._device.load(ModelFiles(source, self._description, digest.result), show)
            self._num_token_ids = min(tokenizer.result().vocab_size, self._description.vocab_size)
            self._digest = digest.result()
        self._processors = load_processors(
            model.logits_processors, ProcessorConfig(model.model, self._num_token_ids, tokenizer.result())
        )
        # Called by name for each request: raises RequestError for settings that a processor refuses.
        self.check_request = self._processors.check
        # `execute_model` then only hands a step to threads of the device's own, and `take_output` waits.
        self.steps_run_elsewhere = self._device.steps_run_elsewhere
        # Memory that was asked for in bytes is taken while there is time; the default is a limit, and stays one.
        self._touches_ahead = config.cache.kv_cache_memory_bytes is not None
        self._kv_cache = KVCacheConfig(0, config.cache.block_size)
        self._max_model_len = self._description.max_position_embeddings
        # Called by name as well: starts, stops or drops this rank's part of a profile.
        self.profile = Profiler(config.observability.torch_profiler_dir, self._device, self.get_rank()).act

    def get_kv_cache_specs(self) -> list[LayerKVSpec]:
        """What each attention layer of this rank keeps per token, by the model's layer numbers."""
        return self._device.kv_specs()

    def determine_available_memory(self) -> int:
        """Bytes free for the KV cache: under the container's limit on CPU, on the device otherwise."""
        return self._device.available_memory()

    def get_model_limits(self) -> ModelLimits:
        """What the model itself sets."""
        limit = self._description.max_position_embeddings
        return ModelLimits(limit, self._num_token_ids, self._device.kind)

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache and runs the first step, which is slower than those that follow."""
        self._kv_cache, self._max_model_len = kv_cache, max_model_len
        self._device.prepare(kv_cache, max_model_len, self._num_token_ids)
        self._runner = Runner(self._device, kv_cache, self._processors, self._rank)
        self._runner.warm_up(1)

    def measure_token_rate(self) -> float:
        """Tokens per second of a forward pass over one sequence, which the first pass has warmed up."""
        runner = self._require_runner()
        tokens = min(PROBE_TOKENS, self._max_model_len)
        start = time.perf_counter()
        runner.warm_up(tokens)
        return tokens / (time.perf_counter() - start)

    def describe(self) -> dict[str, str]:
        """The fingerprint parts that this rank knows."""
        mode = self._device.mode
        return {
            "weights": self._digest,
            "mode": mode.name,
            "kv_dtype": mode.kv,
            "rope": ", ".join(sorted({str(rope) for rope in self._description.layer_ropes})),
            "tensor_parallel_size": str(self._rank.grid.tensor_parallel_size),
            **self._device.describe(),
            **self._processors.describe(),
        }

    def get_rank(self) -> int:
        """This worker's rank."""
        return self._rank.index

    def use_idle_time(self) -> bool:
        """Some milliseconds of what makes later steps faster; False when nothing is left to do."""
        return self._touches_ahead and self._device.touch()

    def watch_progress(self, page: ProgressPage) -> None:
        """Every step moves `page` forward, at least once for each layer."""
        self._device.watch_progress(page)

    def sleep(self, part: str) -> None:
        """Gives the memory of `kv_cache` or `weights` back to the system, between steps; contents are lost."""
        if part == "kv_cache":
            self._device.keep_kv(False)
        else:
            self._device.unload()
        give_back_free_memory()

    def wake_up(self, part: str) -> None:
        """Takes `kv_cache` or `weights` back. Raises ConfigError where the files no longer hold the same model."""
        if part == "kv_cache":
            self._device.keep_kv(True)
            return
        if source_digest(self._source) != self._digest:
            raise ConfigError("the model's files are not those that the engine started with")
        self._device.load(ModelFiles(self._source, self._description, lambda: self._digest), show=False)
        self._device.prepare(self._kv_cache, self._max_model_len, self._num_token_ids)


def run_dtype(asked: str, stored: str) -> str:
    """The run dtype: the checkpoint's for `auto`."""
    return stored if asked == "auto" else asked
