"""NativeDevice: a CPU with native kernels. The model's forward is recorded into a program, which each step replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evensong.kernels.cpu.native import chosen_isa, extension, multiplies_bfloat16
from evensong.kernels.cpu.recorder import NativeLinks, Watchers
from evensong.kernels.mode import numeric_mode
from evensong.layers.rotary import rotary_tables
from evensong.observe.chrome_trace import PartWriter
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.sampling.native_draws import NativeDraws
from evensong.sampling.row import SamplingRow
from evensong.utils.machine import available_memory_bytes, compute_threads
from evensong.utils.progress import LAST_WORD, TICKS_WORD, ProgressPage
from evensong.worker.batch import Batch
from evensong.worker.device import PROBE, Device, DeviceSettings, DeviceStep, ModelFiles, StepMark
from evensong.worker.kv_memory import HostKV
from evensong.worker.native_links import native_links
from evensong.worker.native_model import NativeModel, load_native
from evensong.worker.native_step import NativeStep
from evensong.worker.recording import LayerMemory, Recording
from evensong.worker.trace import write_native_trace


class NativeDevice(Device):
    """`isa`, if given, replaces the best instruction set of this processor: for tests."""

    kind = "cpu"
    steps_run_elsewhere = True

    def __init__(self, settings: DeviceSettings, *, isa: str | None = None, threads: int | None = None) -> None:
        self._isa = isa or chosen_isa()
        self._settings = settings
        # Op by op, `start` runs the step.
        self.runs_ahead = not settings.enforce_eager
        multiplies = multiplies_bfloat16(self._isa)
        self.mode = numeric_mode(settings.dtype, "cpu", multiplies_bfloat16=multiplies).with_kv(settings.kv_dtype)
        self._native = extension()
        processors = settings.processors
        threads = threads or (len(processors) if processors else compute_threads())
        self._engine = self._native.Engine(threads, None if processors is None else list(processors))
        self._draws = NativeDraws(self._isa)
        self._loaded: NativeModel | None = None
        self._links: NativeLinks | None = None
        self._kv: HostKV | None = None
        self._plan: Recording | None = None
        self.watchers = Watchers()

    def load(self, files: ModelFiles, show: bool) -> None:
        share = self._settings.share(files.description)
        self._loaded = load_native(files, share, self._isa, self.mode.stored, self._engine.threads, show)

    def unload(self) -> None:
        self._plan, self._loaded = None, None

    def kv_specs(self) -> list[LayerKVSpec]:
        return self._model.model.kv_specs(self.mode.kv)

    def available_memory(self) -> int:
        return available_memory_bytes()

    def prepare(self, kv_cache: KVCacheConfig, max_model_len: int, num_token_ids: int) -> None:
        if self._kv is None:
            self._kv = HostKV(self.kv_specs(), kv_cache, self.mode.kv)
        description, model, rank = self._model.description, self._model.model, self._settings.rank
        if self._links is None:
            self._links = native_links(self._settings.links_fd, rank, kv_cache, description)
        tables = rotary_tables(description.rotary_dim, description.layer_ropes, max_model_len)
        memory = LayerMemory(
            self._kv.arrays, self.kv_specs(), kv_cache, [tables[rope] for rope in description.layer_ropes]
        )
        self._plan = Recording(
            self._isa, self.mode, model, rank, self._links, memory, max_model_len, num_token_ids, self.watchers
        )

    def start(self, batch: Batch, rows: Sequence[SamplingRow], mark: StepMark = PROBE) -> DeviceStep:
        settings = self._settings
        return NativeStep(
            self._engine, self._recording, self._draws, batch, rows, mark, settings.rank, settings.enforce_eager
        )

    def set_doorbell(self, fd: int) -> None:
        self._engine.set_doorbell(fd)

    def describe(self) -> dict[str, str]:
        # Not the number of threads: no bit depends on it.
        return {"kernel_build": f"evensong {self._native.BUILD}", "isa": self._isa, "deterministic": "yes"}

    def watch_progress(self, page: ProgressPage) -> None:
        self._engine.set_progress(np.frombuffer(page.words, dtype=np.uint64), TICKS_WORD, LAST_WORD)

    def start_trace(self) -> Callable[[PartWriter], None]:
        engine, program = self._engine, self._recording.program
        # Now, for at the end the weights may be asleep.
        names = [program.segment_name(index) for index in range(program.num_segments)]
        engine.take_spans()
        engine.take_steps()
        engine.record_spans(True)

        def stop(writer: PartWriter) -> None:
            engine.record_spans(False)
            write_native_trace(writer, names, engine.take_spans(), engine.take_steps())

        return stop

    @property
    def _model(self) -> NativeModel:
        assert self._loaded is not None, "the weights are asleep"
        return self._loaded

    @property
    def _recording(self) -> Recording:
        assert self._loaded is not None, "the weights are asleep"
        assert self._plan is not None, "prepare comes first"
        return self._plan
