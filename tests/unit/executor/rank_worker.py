"""A rank without a model, for tests of the processes around it. What it does wrong, the model's name says."""

from __future__ import annotations

import collections
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from evensong.config.sections import EngineConfig
from evensong.distributed.grid import Rank
from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.utils.progress import ProgressPage

CLASS = "tests.unit.executor.rank_worker:RankWorker"
# Steps with these ids do what they are called after.
RAISES, EXITS, HANGS, SLOW, WAITS, LARGE = 1001, 1002, 1003, 1004, 1005, 1006


class RankWorker:
    """Steps end in a thread of their own, as a device's do; each gives its plan's id as a token."""

    def __init__(
        self, config: EngineConfig, rank: Rank, links_fd: int | None, processors: tuple[int, ...] | None
    ) -> None:
        match config.model.model.split(":"):
            case ["config error", index] if int(index) == rank.index:
                raise ConfigError("the weights are damaged")
            case ["value error", index] if int(index) == rank.index:
                raise ValueError("cannot load")
            case ["killed", index] if int(index) == rank.index:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["silent", index] if int(index) == rank.index:
                os._exit(7)
        self.model = config.model.model
        self.rank = rank
        self.links_fd = links_fd
        self.processors = processors
        self.calls: list[str] = []
        self.page: ProgressPage | None = None
        self._bell = -1
        self._ended: collections.deque[ModelOutput | None | Exception] = collections.deque()
        self._deferred: SchedulerOutput | None = None
        self._device = ThreadPoolExecutor(max_workers=1)
        self.num_in_flight = 0

    def get_kv_cache_specs(self) -> list[LayerKVSpec]:
        return [LayerKVSpec(self.rank.stage, 1 + self.rank.part, 8, "float32", 4)]

    def determine_available_memory(self) -> int:
        return 1000 * (1 + self.rank.index)

    def get_model_limits(self) -> ModelLimits:
        return ModelLimits(10, 20, "cpu")

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        self.calls.append(f"initialize {kv_cache.num_blocks} {max_model_len}")

    def measure_token_rate(self) -> float:
        return 5.0 + self.rank.index

    def describe(self) -> dict[str, str]:
        own = str(self.rank.index) if self.model == "mismatched" else "same"
        return {"weights": own, "mode": "float32", "threads": str(1 + self.rank.index)}

    def watch_progress(self, page: ProgressPage) -> None:
        self.page = page

    def set_doorbell(self, fd: int) -> None:
        self._bell = fd

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.calls.append(f"execute {plan.step_id}")
        self.num_in_flight += 1
        if plan.step_id == EXITS:
            raise SystemExit(5)
        if plan.step_id == HANGS:
            time.sleep(1000)
        self._deferred = plan

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> None:
        assert self._deferred is not None, "sample without execute"
        plan, self._deferred = self._deferred, None
        self.calls.append(f"sample {plan.step_id} {None if bitmask is None else bitmask.words.decode()}")
        if self.rank.is_output and plan.step_id == RAISES:
            self._end(RuntimeError("the step failed"))
            return
        words = [] if bitmask is None else [len(bitmask.words)]
        ids = plan.sampling_request_ids
        tokens = [plan.step_id] * (500_000 if plan.step_id == LARGE else 1)
        output = ModelOutput(ids, [[*tokens, *words] for _ in ids], [None] * len(ids))
        seconds = {SLOW: 0.3, WAITS: 1000.0}.get(plan.step_id, 0.001)
        self._device.submit(self._end, output if self.rank.is_output else None, seconds)

    def _end(self, result: ModelOutput | None | Exception, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        self._ended.append(result)
        os.write(self._bell, (1).to_bytes(8, "little"))

    def output_ready(self) -> bool:
        return bool(self._ended)

    def take_output(self) -> ModelOutput | None:
        while not self._ended:
            time.sleep(0.001)
        self.num_in_flight -= 1
        result = self._ended.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def use_idle_time(self) -> bool:
        return self.rank.index == 1

    # ---- called by name

    def get_rank(self) -> int:
        return self.rank.index

    def get_calls(self) -> list[str]:
        return self.calls

    def get_place(self) -> dict[str, object]:
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        return {
            "affinity": sorted(os.sched_getaffinity(0)),
            "processors": self.processors,
            "links": self.links_fd is not None and os.fstat(self.links_fd).st_size == 0,
            "group": os.getpgid(0) == os.getpid(),
            "variables": {name: os.environ.get(name) for name in names},
        }

    def check_request(self, params: SamplingParams) -> None:
        if params.temperature == 0.5:
            raise RequestError("no such temperature", status=422, param="temperature")

    def fail(self, index: int) -> int:
        if index in (self.rank.index, -1):
            raise KeyError("wrong")
        return index

    def doze(self, seconds: float) -> float:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.page is not None
            self.page.tick()
            time.sleep(0.01)
        return seconds

    def grow(self, count: int) -> list[int]:
        return list(range(count))

    def cannot_cross(self) -> object:
        return object()
