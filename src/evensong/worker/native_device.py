"""NativeDevice: a CPU with native kernels. The model's forward is recorded into a program, which each step replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from evensong.kernels.cpu.builders import NativeBuilder, PackingBuilder
from evensong.kernels.cpu.native import chosen_isa, extension, multiplies_bfloat16
from evensong.kernels.cpu.packed_file import PackedFile, packed_key, packed_path
from evensong.kernels.cpu.packed_writer import PackedWriter, open_or_pack
from evensong.kernels.cpu.recorder import Watchers
from evensong.kernels.mode import numeric_mode
from evensong.layers.rotary import rotary_tables
from evensong.models.base import CausalLM
from evensong.models.check import check_model
from evensong.models.loader import TensorReader, build_model
from evensong.observe.chrome_trace import PartWriter
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.protocol.output import TokenLogprobs
from evensong.sampling.native_draws import NativeDraws, compose
from evensong.sampling.row import Bitmask, Float32, SamplingRow
from evensong.sampling.sampler import NO_TOKEN, Sampled, sample_row
from evensong.sources.model_description import ModelDescription
from evensong.sources.weights import open_weights
from evensong.utils.machine import available_memory_bytes, compute_threads
from evensong.utils.progress import LAST_WORD, TICKS_WORD, ProgressPage
from evensong.worker.batch import Batch
from evensong.worker.device import (
    NO_MASKS,
    ROWS_AT_ONCE,
    Device,
    DeviceSettings,
    ModelFiles,
    NotFiniteError,
    with_masks,
)
from evensong.worker.kv_memory import HostKV
from evensong.worker.native_rows import given_rows, logits_rows, masks_of, row_changes_logits, rows_of
from evensong.worker.recording import LayerMemory, Recording
from evensong.worker.trace import write_native_trace


class NativeDevice(Device):
    """`isa`, if given, replaces the best instruction set of this processor: for tests."""

    kind = "cpu"
    steps_run_elsewhere = True

    def __init__(self, settings: DeviceSettings, *, isa: str | None = None, threads: int | None = None) -> None:
        self._isa = isa or chosen_isa()
        self._eager = settings.enforce_eager
        multiplies = multiplies_bfloat16(self._isa)
        self.mode = numeric_mode(settings.dtype, "cpu", multiplies_bfloat16=multiplies).with_kv(settings.kv_dtype)
        self._native = extension()
        self._engine = self._native.Engine(threads or compute_threads())
        self._draws = NativeDraws(self._isa)
        self._loaded: tuple[ModelDescription, CausalLM, PackedFile] | None = None
        self._kv: HostKV | None = None
        self._plan: Recording | None = None
        self.watchers = Watchers()
        self._running: tuple[int, tuple[Any, ...]] | None = None
        self._last: tuple[Any, ...] = ()
        self._rows: Sequence[SamplingRow] = ()
        self._deferred: Any = None

    def load(self, files: ModelFiles, show: bool) -> None:
        description = files.description
        weights = open_weights(files.source)
        check_model(description, weights)
        parts = {"model": files.digest(), "isa": self._isa, "build": self._native.BUILD, "stored": self.mode.stored}
        key = packed_key(parts)
        path = packed_path(files.source.name, key)

        def pack(writer: PackedWriter) -> dict[str, Any]:
            with (
                tqdm(total=len(weights), desc="packing weights", unit="tensor", disable=not show, leave=False) as bar,
                TensorReader(weights, lambda: bar.update(1)) as read,
            ):
                build_model(description, PackingBuilder(read, writer, self._isa, self.mode.stored))
            return {}

        packed = open_or_pack(path, key, pack, self._native.checksum, self._engine.threads)
        self._loaded = description, build_model(description, NativeBuilder(packed, self._isa)), packed

    def unload(self) -> None:
        self._plan, self._loaded = None, None
        self._last = ()

    def kv_specs(self) -> list[LayerKVSpec]:
        return self._model[1].kv_specs(self.mode.kv)

    def available_memory(self) -> int:
        return available_memory_bytes()

    def prepare(self, kv_cache: KVCacheConfig, max_model_len: int, num_token_ids: int) -> None:
        if self._kv is None:
            self._kv = HostKV(self.kv_specs(), kv_cache, self.mode.kv)
        description, model, _ = self._model
        tables = rotary_tables(description.rotary_dim, description.layer_ropes, max_model_len)
        memory = LayerMemory(
            self._kv.arrays, self.kv_specs(), kv_cache, [tables[rope] for rope in description.layer_ropes]
        )
        self._plan = Recording(self._isa, self.mode, model, memory, max_model_len, num_token_ids, self.watchers)

    def start(self, batch: Batch, rows: Sequence[SamplingRow]) -> None:
        self._copy_blocks(batch)
        plan = self._recording
        counts = np.array(batch.num_query_tokens, dtype=np.int32)
        starts = np.array(batch.num_computed_tokens, dtype=np.int32)
        inputs = (counts, starts, batch.block_tables, batch.token_ids)
        self._rows = rows
        # Where masks may come the step ends with the logits, and `finish` draws.
        self._deferred = batch.sample_rows if any(row.constrained for row in rows) else None
        samples = rows_of(rows) if self._deferred is None else logits_rows(len(rows))
        if self._eager:
            plan.run_eagerly(self._engine, inputs, batch.sample_rows, samples)
        ticket = self._engine.submit(
            plan.program,
            *inputs,
            batch.sample_rows,
            samples,
            first=plan.sampling_begins if self._eager else 0,
            last=None if self._deferred is None else plan.sampling_begins,
        )
        self._running = ticket, inputs

    def finish(self, masks: Mapping[int, Bitmask] = NO_MASKS) -> list[Sampled]:
        assert self._running is not None, "finish without start"
        (ticket, inputs), self._running = self._running, None
        rows = with_masks(self._rows, masks)
        # Handed in while the model runs: it follows at once.
        drawing = None if self._deferred is None else self._draw(inputs, self._deferred, rows)
        try:
            results = self._engine.wait(ticket)
        finally:
            if drawing is not None:
                results = self._engine.wait(drawing)
        self._last = inputs
        return [self._sampled(index, row, results) for index, row in enumerate(rows)]

    def _draw(self, inputs: tuple[Any, ...], sample_rows: Any, rows: Sequence[SamplingRow]) -> int:
        """The sampler alone, over the logits that the step before it leaves; a ticket."""
        plan = self._recording
        ticket: int = self._engine.submit(
            plan.program, *inputs, sample_rows, rows_of(rows), first=plan.sampling_begins, masks=masks_of(rows)
        )
        return ticket

    def _sampled(self, index: int, row: SamplingRow, results: Any) -> Sampled:
        if row_changes_logits(row):
            return sample_row(self._logits_row(index), row, self._draws)
        token_id = int(results[0][index])
        if token_id < 0 and row.bitmask is not None:
            return sample_row(self._logits_row(index), row, self._draws)  # which tells why
        if token_id < 0:
            return Sampled(-1, error=NO_TOKEN)
        if row.params.num_logprobs is None:
            return Sampled(token_id)
        return Sampled(token_id, self._logprobs(index, token_id, results, row.params.logprob_token_ids or ()))

    def _logprobs(self, index: int, token_id: int, results: Any, asked: Sequence[int] = ()) -> TokenLogprobs:
        """Of the token, of the best and of `asked`, in a row of what the sampler has just given."""
        _, shifts, ranks, found, ids, values = results
        shift, rank, best = float(shifts[index]), int(ranks[index]), slice(0, int(found[index]))
        return compose(self._logits_row(index), token_id, shift, rank, ids[index, best], values[index, best], asked)

    def _logits_row(self, index: int) -> Float32:
        plan = self._recording
        row: Float32 = plan.program.view(plan.logits, index + 1)[index, : plan.num_token_ids]
        return row

    def score(self, rows: range, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            tokens = token_ids[first : first + len(part)]
            results = self._run_head(part, given_rows(tokens, num_best))
            if not np.isfinite(results[1]).all():
                raise NotFiniteError
            scores.extend(self._logprobs(index, token_id, results) for index, token_id in enumerate(tokens))
        return scores

    def logits(self, rows: Sequence[int]) -> Float32:
        self._run_head(rows, logits_rows(len(rows)))
        plan = self._recording
        whole: Float32 = plan.program.view(plan.logits, len(rows))[:, : plan.num_token_ids]
        return whole.copy()

    def _run_head(self, rows: Sequence[int], samples: Any) -> Any:
        """The output head and the sampler once more, over other rows of the last step."""
        assert self._last, "no step has run"
        plan = self._recording
        ticket = self._engine.submit(
            plan.program, *self._last, np.array(rows, dtype=np.int64), samples, first=plan.head_begins
        )
        return self._engine.wait(ticket)

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
    def _model(self) -> tuple[ModelDescription, CausalLM, PackedFile]:
        assert self._loaded is not None, "the weights are asleep"
        return self._loaded

    @property
    def _recording(self) -> Recording:
        assert self._loaded is not None, "the weights are asleep"
        assert self._plan is not None, "prepare comes first"
        return self._plan
