"""Worker: one rank's model, KV cache and sampler. The executor loads this class by name."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from tqdm import tqdm

from evensong.config.sections import EngineConfig
from evensong.kernels.mode import describe_kernels, numeric_mode
from evensong.models.base import CausalLM
from evensong.models.loader import load_model
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import ModelSource, resolve_model
from evensong.sources.tokenizer import load_tokenizer
from evensong.sources.weights import open_weights, source_digest
from evensong.utils.machine import available_memory_bytes, give_back_free_memory, usable_cpus
from evensong.worker.kv_memory import KVMemory
from evensong.worker.profiler import Profiler
from evensong.worker.runner import Runner

# Forward passes of this many tokens measure the step rate.
PROBE_TOKENS = 64
# Share of a CUDA device's free memory that the cache may take.
CUDA_POOL_SHARE = 0.85


class Worker:
    """Construction picks the device and loads the weights; `initialize_from_config` allocates the KV cache."""

    def __init__(self, config: EngineConfig) -> None:
        self._device = pick_device(config.model.device)
        if self._device.type == "cpu":
            # Threads belong to the calling thread in OpenMP, and this is the one that runs the model.
            torch.set_num_threads(intra_op_threads())
        source = resolve_model(config.model.model, revision=config.model.revision, progress=False, fetched=True)
        self._source = source
        self._description = load_model_description(source)
        self._mode = numeric_mode(run_dtype(config.model.dtype, self._description.torch_dtype), self._device)
        # Both only read files, beside the loading of the weights.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="files") as files:
            digest = files.submit(source_digest, source)
            tokenizer = files.submit(load_tokenizer, source)
            self._model: CausalLM | None = self._load(source, show=config.observability.use_tqdm_on_load)
            self._num_token_ids = min(tokenizer.result().vocab_size, self._description.vocab_size)
            self._digest = digest.result()
        self._max_model_len = self._description.max_position_embeddings
        # Memory that was asked for in bytes is taken while there is time; the default is a limit, and stays one.
        self._touches_ahead = config.cache.kv_cache_memory_bytes is not None
        self._memory: KVMemory | None = None
        self._runner: Runner | None = None
        self._profiler = Profiler(config.observability.torch_profiler_dir, self._device)

    def _load(self, source: ModelSource, *, show: bool) -> CausalLM:
        weights = open_weights(source)
        with tqdm(total=len(weights), desc="loading weights", unit="tensor", disable=not show, leave=False) as bar:
            return load_model(self._description, weights, self._mode, self._device, lambda: bar.update(1))

    def get_kv_cache_specs(self) -> list[LayerKVSpec]:
        """What each attention layer keeps per token."""
        return self._require_model().kv_specs()

    def determine_available_memory(self) -> int:
        """Bytes free for the KV cache: under the container's limit on CPU, on the device otherwise."""
        if self._device.type == "cpu":
            return available_memory_bytes()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free * CUDA_POOL_SHARE)

    def get_model_limits(self) -> ModelLimits:
        """What the model itself sets."""
        limit = self._description.max_position_embeddings
        return ModelLimits(limit, self._num_token_ids, self._device.type)

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache and runs the first pass, which is slower than those that follow."""
        model = self._require_model()
        model.set_max_model_len(max_model_len)
        self._max_model_len = max_model_len
        self._memory = KVMemory(model.kv_specs(), kv_cache, self._mode.kv, self._device)
        self._runner = Runner(model, self._memory.caches, kv_cache, self._num_token_ids, self._device)
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
        return {
            "weights": self._digest,
            "mode": self._mode.name,
            "trial_results": self._require_model().trial_results,
            "kv_dtype": str(self._mode.kv).removeprefix("torch."),
            "rope": ", ".join(sorted({str(rope) for rope in self._description.layer_ropes})),
            "tensor_parallel_size": "1",
            "threads": str(torch.get_num_threads()) if self._device.type == "cpu" else "1",
            **describe_kernels(self._device),
        }

    def get_rank(self) -> int:
        """This worker's rank."""
        return 0

    def execute_model(self, plan: SchedulerOutput) -> None:
        """The forward pass of a plan."""
        self._require_runner().execute(plan)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelOutput:
        """Tokens of the rows that the last plan samples."""
        assert bitmask is None, "no constrained request can be admitted"
        return self._require_runner().sample()

    def use_idle_time(self) -> bool:
        """Some milliseconds of what makes later steps faster; False when nothing is left to do."""
        return self._touches_ahead and self._memory is not None and self._memory.touch()

    def watch_progress(self, tick: Callable[[], None]) -> None:
        """`tick` is called at every layer of every step."""
        self._require_runner().watch_progress(tick)

    def sleep(self, part: str) -> None:
        """Gives the memory of `kv_cache` or `weights` back to the system, between steps; contents are lost."""
        assert self._memory is not None
        if part == "kv_cache":
            self._memory.release()
        else:
            self._require_runner().set_model(None)
            self._model = None
            gc.collect()
        give_back_free_memory()

    def wake_up(self, part: str) -> None:
        """Takes `kv_cache` or `weights` back. Raises ConfigError where the files no longer hold the same model."""
        assert self._memory is not None
        if part == "kv_cache":
            self._memory.restore()
            return
        if source_digest(self._source) != self._digest:
            raise ConfigError("the model's files are not those that the engine started with")
        model = self._load(self._source, show=False)
        model.set_max_model_len(self._max_model_len)
        self._model = model
        self._require_runner().set_model(model)

    def start_profile(self, prefix: str | None = None) -> None:
        """Starts torch's profiler in this thread. Raises RequestError where it cannot."""
        self._profiler.start(prefix)

    def stop_profile(self) -> str:
        """The trace file that was written. Raises RequestError when no profiler runs."""
        return self._profiler.stop()

    def _require_model(self) -> CausalLM:
        assert self._model is not None, "the weights are asleep"
        return self._model

    def _require_runner(self) -> Runner:
        assert self._runner is not None, "initialize_from_config comes first"
        return self._runner


def intra_op_threads() -> int:
    """Threads that share one op on CPU: every processor that may be used, or fewer where OMP_NUM_THREADS says so."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(usable_cpus(), int(asked)) if asked.isdigit() and int(asked) else usable_cpus()


def pick_device(asked: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here. Raises ConfigError when there is none."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device can be used here")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def run_dtype(asked: str, stored: str) -> str:
    """The run dtype: the checkpoint's for `auto`."""
    return stored if asked == "auto" else asked
