"""Runs requests through a real worker on a tiny model, with the plans that a test asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evensong.config.sections import EngineConfig, ModelConfig, ObservabilityConfig
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.output import TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import CachedRequestData, ModelOutput, NewRequestData, SchedulerOutput
from evensong.testing.tiny_models import NUM_TOKENS
from evensong.worker.worker import Worker

BLOCK = 8
NUM_BLOCKS = 120


def make_worker(folder: Path, dtype: str = "auto", max_model_len: int = 256, **observability: Any) -> Worker:
    """A worker with its KV cache."""
    model = ModelConfig(model=str(folder), dtype=dtype, device="cpu")  # type: ignore[arg-type]
    worker = Worker(EngineConfig(model=model, observability=ObservabilityConfig(**observability)))
    worker.initialize_from_config(KVCacheConfig(NUM_BLOCKS, BLOCK), max_model_len)
    return worker


@contextlib.contextmanager
def spoiled(worker: Worker, row: int) -> Iterator[None]:
    """In every step the last layer leaves NaN in this row of the residual stream, the native program's first buffer."""
    device: Any = worker._device

    def spoil(num_rows: int) -> None:
        if row < num_rows:
            device._recording.program.view(0, num_rows)[row] = np.nan

    device.watchers.callbacks["layer 1"] = spoil
    device.prepare(worker._kv_cache, worker._max_model_len, NUM_TOKENS)
    try:
        yield
    finally:
        del device.watchers.callbacks["layer 1"]
        device.prepare(worker._kv_cache, worker._max_model_len, NUM_TOKENS)


@dataclass
class Job:
    """One request as the test sees it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    has_slot: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)


class World:
    """Builds plans by hand. Blocks are handed out from a list, so that a test chooses where keys and values lie."""

    def __init__(self, worker: Worker, free: list[int] | None = None) -> None:
        self.worker = worker
        self.free = list(range(NUM_BLOCKS)) if free is None else free
        self.released: list[str] = []
        self._step = 0

    def step(self, work: list[tuple[Job, int]]) -> ModelOutput:
        """One step that computes the given number of tokens of each job."""
        new, cached = [], CachedRequestData([], [], [])
        counts: dict[str, int] = {}
        sampling = []
        for job, count in work:
            needed = -(-(job.computed + count) // BLOCK) - len(job.blocks)
            blocks = [self.free.pop() for _ in range(max(needed, 0))]
            job.blocks += blocks
            if job.has_slot:
                cached.request_ids.append(job.request_id)
                cached.new_block_ids.append(blocks)
                cached.num_computed_tokens.append(job.computed)
            else:
                new.append(
                    NewRequestData(
                        job.request_id,
                        job.prompt,
                        list(job.output),
                        job.params,
                        [256],
                        list(job.blocks),
                        job.computed,
                        len(job.prompt_logprobs),
                    )
                )
                job.has_slot = True
            counts[job.request_id] = count
            if job.computed + count == job.num_tokens:
                sampling.append(job.request_id)
        self._step += 1
        self.worker.execute_model(SchedulerOutput(self._step, new, cached, counts, sampling, self.released))
        self.released = []
        self.worker.sample_tokens(None)
        output = self.worker.take_output()
        assert output is not None
        assert output.request_ids == sampling
        by_id = {job.request_id: job for job, _ in work}
        for job, count in work:
            job.computed += count
        for request_id, scores in output.prompt_scores.items():
            assert scores.start == 1 + len(by_id[request_id].prompt_logprobs), "each position once, in order"
            by_id[request_id].prompt_logprobs += scores.positions
        for request_id, tokens, logprobs in zip(sampling, output.sampled_token_ids, output.logprobs, strict=True):
            by_id[request_id].output += tokens
            by_id[request_id].logprobs += logprobs or []
        return output

    def preempt(self, job: Job) -> None:
        """Takes the job's slot and blocks; it starts again with its output."""
        self.free += job.blocks
        job.blocks, job.computed, job.has_slot = [], 0, False
        self.released.append(job.request_id)

    def finish(self, job: Job) -> None:
        """Takes the job's slot and blocks for good."""
        self.preempt(job)

    def run(self, jobs: list[Job], num_tokens: int, chunk: int = 1 << 30) -> None:
        """All jobs together until each has `num_tokens` output tokens; at most `chunk` tokens of a job in a step."""
        while pending := [job for job in jobs if len(job.output) < num_tokens]:
            self.step([(job, min(chunk, job.num_tokens - job.computed)) for job in pending])
        for job in jobs:
            self.finish(job)
