"""Device: what runs a model on one kind of processor, as the worker and the runner see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from evensong.distributed.grid import ALONE, Rank
from evensong.distributed.split import Share, plan_shares
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
# Steps whose logits are kept at a time: of one that runs, and of the one before it.
BANKS = 2


def num_probe_blocks(block_size: int) -> int:
    """Blocks behind the pool's for a probe; layer groups share them, as nobody reads what a probe computes."""
    return -(-PROBE_TOKENS // block_size)


def most_samples(kv_cache: KVCacheConfig) -> int:
    """The most rows that an output head has to do with at once: prompts are scored ROWS_AT_ONCE rows at a time."""
    return max(kv_cache.max_num_seqs, ROWS_AT_ONCE)


@dataclass(frozen=True)
class DeviceSettings:
    """How a model runs, and what of it. `kv_dtype`: of the cache; `auto` follows the mode.

    `rank`: where the device stands; `links_fd`: the memory that the ranks share, where there are several.
    `pipeline_layers`: layers of each stage, where the user said. `processors`: those that threads are bound to.
    """

    device: str
    dtype: str
    kv_dtype: str = "auto"
    enforce_eager: bool = False
    rank: Rank = ALONE
    links_fd: int | None = None
    pipeline_layers: str | None = None
    processors: tuple[int, ...] | None = None

    def share(self, description: ModelDescription) -> Share:
        """What the rank holds of a model. Raises ConfigError for a grid that cannot serve it."""
        return plan_shares(description, self.rank.grid, self.pipeline_layers)[self.rank.index]


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


@dataclass(frozen=True)
class StepMark:
    """A step's place among those of its device; a probe has none.

    Tokens that an earlier step samples may be named by feed slots: all are there once step `feed_after` has published
    its own. `deferred`: nothing is sampled before `draw`. `publishes`: the device itself says that all tokens of this
    step, and of those before, are there; else `publish` is called.
    """

    step_id: int = -1
    feed_after: int = -1
    deferred: bool = False
    publishes: bool = False

    @property
    def bank(self) -> int:
        """Where its logits lie, until the step after the next one starts."""
        return max(self.step_id, 0) % BANKS


PROBE = StepMark()


class DeviceStep(ABC):
    """A step that was started, until its device has started BANKS more; `score` and `logits` only until the next."""

    @abstractmethod
    def draw(self, masks: Mapping[int, Bitmask] = NO_MASKS) -> None:
        """For a deferred step: its rows may be sampled now. `masks`: by index, those of rows that are constrained."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> None:
        """Until it has run, and its rows are sampled but for those whose logits are changed. Raises what it raised."""

    @abstractmethod
    def sampled(self, index: int) -> Sampled:
        """The result of a sampled row, after `wait`, on the rank that samples. Tokens before it are known by now."""

    @abstractmethod
    def publish(self, tokens: Mapping[int, int]) -> None:
        """Leaves tokens by feed slot, and says that those of all steps up to this one are there."""

    @abstractmethod
    def score(self, rows: range, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
        """Log-probabilities of `token_ids`, each after its row of the step, and of the `num_best` best at each.

        After `wait` and `sampled`. Logits are made for ROWS_AT_ONCE rows at a time, by all ranks of the last stage
        together; the output rank has the result. Raises NotFiniteError, once all is done that others wait for.
        """

    @abstractmethod
    def logits(self, rows: Sequence[int]) -> Float32:
        """Logits [len(rows), num_token_ids] of rows of the step; at most ROWS_AT_ONCE. For tests.

        All ranks of the last stage are asked at the same time; others have none.
        """


class Device(ABC):
    """Weights, KV memory, forward passes and sampling."""

    kind: str
    mode: NumericMode
    # Whether steps run in threads of the device's own.
    steps_run_elsewhere = False
    # Whether `start` then only hands the step in, so that tokens may be named by feed slots before they are sampled.
    runs_ahead = False
    _kv: KVMemory | None = None

    @abstractmethod
    def load(self, files: ModelFiles, show: bool) -> None:
        """Takes the weights; a bar where `show` and stderr is a terminal. Raises ConfigError for damaged files."""

    @abstractmethod
    def unload(self) -> None:
        """Gives the weights back."""

    @abstractmethod
    def kv_specs(self) -> list[LayerKVSpec]:
        """What each attention layer of this rank keeps per token, by the model's layer numbers."""

    @abstractmethod
    def available_memory(self) -> int:
        """Bytes free for the KV cache."""

    @abstractmethod
    def prepare(self, kv_cache: KVCacheConfig, max_model_len: int, num_token_ids: int) -> None:
        """After `load`: the cache, the first time, and all that depends on its size and on the fitted length."""

    @abstractmethod
    def start(self, batch: Batch, rows: Sequence[SamplingRow], mark: StepMark = PROBE) -> DeviceStep:
        """Starts a step behind those before it; `rows` are the requests of its sampled rows.

        Its blocks are copied, then its forward pass runs.
        """

    @abstractmethod
    def set_doorbell(self, fd: int) -> None:
        """An eventfd that grows whenever a step has run that `start` did not wait for; -1: none."""

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
