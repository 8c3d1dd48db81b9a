"""A worker without a model, for tests of the executor alone."""

from __future__ import annotations

import threading
import time

from evensong.config.sections import EngineConfig
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.step import ModelOutput, SchedulerOutput


class RecordingWorker:
    """Notes each call and the thread that made it."""

    def __init__(self, config: EngineConfig) -> None:
        if config.model.model == "broken":
            raise ValueError("cannot load")
        self.calls: list[str] = ["init"]
        self.threads = {threading.get_ident()}
        self.gate = threading.Event()
        self.gate.set()
        self.number = 7

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())

    def get_kv_cache_specs(self) -> list[LayerKVSpec]:
        self._note("specs")
        return [LayerKVSpec(0, 1, 8, "float32", 4)]

    def determine_available_memory(self) -> int:
        self._note("memory")
        return 1000

    def get_model_limits(self) -> ModelLimits:
        self._note("limits")
        return ModelLimits(10, 20, "cpu")

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        self._note(f"initialize {kv_cache.num_blocks} {max_model_len}")

    def measure_token_rate(self) -> float:
        self._note("rate")
        return 5.0

    def describe(self) -> dict[str, str]:
        self._note("describe")
        return {"weights": "none"}

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.gate.wait(10)
        self._note(f"execute {plan.step_id}")
        if plan.step_id < 0:
            raise RuntimeError("the step failed")

    def sample_tokens(self, bitmask: None) -> None:
        self._note("sample")

    def output_ready(self) -> bool:
        return "sample" in self.calls

    def take_output(self) -> ModelOutput:
        self._note("take")
        return ModelOutput(["a"], [[3]], [None])

    def add(self, a: int, b: int) -> int:
        self._note("add")
        return a + b

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise KeyError("wrong")

    def get_calls(self) -> list[str]:
        return self.calls

    def get_num_threads(self) -> int:
        return len(self.threads)
