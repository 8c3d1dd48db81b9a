"""Device: what runs a model on one kind of processor, as the worker and the runner see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from evensong.kernels.mode import NumericMode
from evensong.observe.chrome_trace import PartWriter
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.protocol.output import TokenLogprobs
from evensong.sampling.row import Bitmask, Float32, SamplingRow
from evensong.sampling.sampler import Sampled
from evensong.sources.model_description import ModelDescription
from evensong.sources.resolve import ModelSource
from evensong.utils.progress import ProgressPage
from evensong.worker.batch import Batch

# Positions of a prompt whose logits are made together: times the vocabulary, in float32, 13 MB for 50,000 tokens.
ROWS_AT_ONCE = 64
# Steps of this many tokens warm up and measure. They have blocks of their own behind the pool's, so that they disturb
# nobody whenever they run.
PROBE_TOKENS = 64


def num_probe_blocks(block_size: int) -> int:
    """Blocks behind the pool's for a probe; layer groups share them, as nobody reads what a probe computes."""
    return -(-PROBE_TOKENS // block_size)


@dataclass(frozen=True)
class DeviceSettings:
    """What a user decides of how a model runs. `kv_dtype`: of the cache; `auto` follows the mode."""

    device: str
    dtype: str
    kv_dtype: str = "auto"
    enforce_eager: bool = False


@dataclass(frozen=True)
class ModelFiles:
    """A model's description, its files, and their digest (worked out while something else happens)."""

    source: ModelSource
    description: ModelDescription
    digest: Callable[[], str]


NO_MASKS: Mapping[int, Bitmask] = {}


def with_masks(rows: Sequence[SamplingRow], masks: Mapping[int, Bitmask]) -> Sequence[SamplingRow]:
    """`rows`, each with its mask where it has one."""
    if not masks:
        return rows
    return [replace(row, bitmask=masks[i]) if i in masks else row for i, row in enumerate(rows)]


class NotFiniteError(ArithmeticError):
    """A row of logits holds NaN, or nothing that is finite."""


class KVMemory(Protocol):
    """The memory of a device's KV cache, whatever holds it."""

    def touch(self) -> bool:
        """As Device.touch."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, from and to, in this order."""

    def release(self) -> None:
        """Gives the memory back; contents are lost."""

    def restore(self) -> None:
        """Takes it again."""


class Device(ABC):
    """Weights, KV memory, forward passes and sampling. Every step is `start` and then `finish`, once each.

    After `finish`, and until the next `start`, the step's hidden states are there for `score`.
    """

    kind: str
    mode: NumericMode
    # Whether `start` only hands the step to threads of the device's own.
    steps_run_elsewhere = False
    _kv: KVMemory | None = None

    @abstractmethod
    def load(self, files: ModelFiles, show: bool) -> None:
        """Takes the weights; a bar where `show` and stderr is a terminal. Raises ConfigError for damaged files."""

    @abstractmethod
    def unload(self) -> None:
        """Gives the weights back."""

    @abstractmethod
    def kv_specs(self) -> list[LayerKVSpec]:
        """What each attention layer keeps per token."""

    @abstractmethod
    def available_memory(self) -> int:
        """Bytes free for the KV cache."""

    @abstractmethod
    def prepare(self, kv_cache: KVCacheConfig, max_model_len: int, num_token_ids: int) -> None:
        """After `load`: the cache, the first time, and all that depends on its size and on the fitted length."""

    @abstractmethod
    def start(self, batch: Batch, rows: Sequence[SamplingRow]) -> None:
        """Copies the batch's blocks and starts its forward pass; `rows` are the requests of its sampled rows."""

    @abstractmethod
    def finish(self, masks: Mapping[int, Bitmask] = NO_MASKS) -> list[Sampled]:
        """Waits for it; one result for each sampled row. `masks`: by index, those of rows that are constrained."""

    @abstractmethod
    def score(self, rows: range, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
        """Log-probabilities of `token_ids`, each after its row of the step, and of the `num_best` best at each.

        Logits are made for ROWS_AT_ONCE rows at a time. Raises NotFiniteError.
        """

    @abstractmethod
    def logits(self, rows: Sequence[int]) -> Float32:
        """Logits [len(rows), num_token_ids] of rows of the last step; at most ROWS_AT_ONCE. For tests."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """The fingerprint parts that the device knows."""

    def touch(self) -> bool:
        """Finds the pages of some of the KV memory ahead of their use; False when nothing is left."""
        return self._kv is not None and self._kv.touch()

    def keep_kv(self, keep: bool) -> None:
        """Gives the KV memory's pages back, contents lost, or takes them again."""
        assert self._kv is not None, "prepare comes first"
        if keep:
            self._kv.restore()
        else:
            self._kv.release()

    def _copy_blocks(self, batch: Batch) -> None:
        if batch.block_copies:
            assert self._kv is not None, "prepare comes first"
            self._kv.copy_blocks(batch.block_copies)

    @abstractmethod
    def watch_progress(self, page: ProgressPage) -> None:
        """Every step moves the page forward, at least once for each layer."""

    @abstractmethod
    def start_trace(self) -> Callable[[PartWriter], None]:
        """Begins to note what runs when. What is returned ends that and writes what was noted; it raises OSError."""
