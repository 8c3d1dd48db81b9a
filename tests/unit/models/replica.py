"""A replica whose ranks are devices in this process, each with threads of its own, over one shared memory."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from evensong.distributed.grid import RankGrid
from evensong.kernels.dispatch import OpSet
from evensong.kernels.mode import NumericMode
from evensong.kvcache.layout import merge_specs
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec
from evensong.protocol.output import TokenLogprobs
from evensong.sampling.row import Bitmask, Float32, SamplingRow
from evensong.sampling.sampler import Sampled
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import source_digest
from evensong.worker.batch import Batch
from evensong.worker.device import NO_MASKS, PROBE, Device, DeviceSettings, DeviceStep, ModelFiles, StepMark
from evensong.worker.native_device import NativeDevice
from evensong.worker.torch_device import TorchDevice


class Replica:
    """What a Stepper wants of a device, asked of all ranks at once; the output rank answers."""

    def __init__(self, devices: Sequence[Device], grid: RankGrid) -> None:
        self.devices = list(devices)
        self.grid = grid
        self._kv: Any = None
        self._open()

    def _open(self) -> None:
        """Memory that the ranks share, and a thread for each."""
        fd = os.memfd_create("links")
        weakref.finalize(self, os.close, fd)
        for index, device in enumerate(self.devices):
            made: Any = copy.copy(device)
            made._settings = replace(made._settings, rank=self.grid.rank(index), links_fd=fd)
            made._links = made._kv = None
            self.devices[index] = made
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{i}") for i in range(len(self.devices))]
        for thread in self._threads:
            weakref.finalize(self, thread.shutdown)

    def __copy__(self) -> Replica:
        return Replica(self.devices, self.grid)

    def on_all(self, call: Callable[[Device], Any]) -> list[Any]:
        """What `call` gives for each rank, called in all at the same time."""
        futures = [thread.submit(call, device) for thread, device in zip(self._threads, self.devices, strict=True)]
        return [future.result(timeout=60) for future in futures]

    @property
    def _loaded(self) -> Any:
        output: Any = self.devices[self.grid.output_rank]
        return output._loaded

    def kv_specs(self) -> list[LayerKVSpec]:
        """Of all layers."""
        return merge_specs(self.on_all(lambda device: device.kv_specs()))

    def load(self, model: str) -> None:
        """Reads the weights, on all ranks."""
        files = files_of(model)
        self.on_all(lambda device: device.load(files, show=False))

    def prepare(self, kv_cache: KVCacheConfig, max_model_len: int, num_token_ids: int) -> None:
        """As Device.prepare."""
        self.on_all(lambda device: device.prepare(kv_cache, max_model_len, num_token_ids))

    def start(self, batch: Batch, rows: Sequence[SamplingRow], mark: StepMark = PROBE) -> ReplicaStep:
        """As Device.start; the output rank alone publishes."""
        silent, output = replace(mark, publishes=False), self.devices[self.grid.output_rank]
        steps = self.on_all(lambda device: device.start(batch, rows, mark if device is output else silent))
        return ReplicaStep(self, steps)


class ReplicaStep:
    """A step of all ranks."""

    def __init__(self, replica: Replica, steps: Sequence[DeviceStep]) -> None:
        self._replica = replica
        self.steps = steps
        self._output = replica.grid.output_rank

    def _on_all(self, call: Callable[[DeviceStep], Any]) -> list[Any]:
        of_device = dict(zip(map(id, self._replica.devices), self.steps, strict=True))
        return self._replica.on_all(lambda device: call(of_device[id(device)]))

    def draw(self, masks: Mapping[int, Bitmask] = NO_MASKS) -> None:
        """As DeviceStep.draw."""
        self._on_all(lambda step: step.draw(masks))

    def wait(self) -> None:
        """As DeviceStep.wait."""
        self._on_all(lambda step: step.wait())

    def sampled(self, index: int) -> Sampled:
        """What the output rank drew."""
        return self.steps[self._output].sampled(index)

    def logits(self, rows: Sequence[int]) -> Float32:
        """As DeviceStep.logits; other ranks have none."""
        found = self._on_all(lambda step: step.logits(rows))
        assert all(len(one) == (len(rows) if index == self._output else 0) for index, one in enumerate(found))
        logits: Float32 = found[self._output]
        return logits

    def score(self, rows: range, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
        """As DeviceStep.score; the output rank refuses alone."""
        futures = self._on_all(lambda step: _outcome(lambda: step.score(rows, token_ids, num_best)))
        assert all(one == [] for index, one in enumerate(futures) if index != self._output)
        scores = futures[self._output]
        if isinstance(scores, Exception):
            raise scores
        return list(scores)


def files_of(model: str) -> ModelFiles:
    """The files of a model."""
    source = resolve_model(model, progress=False)
    return ModelFiles(source, load_model_description(source), lambda: source_digest(source))


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def load_replica(
    model: str,
    dtype: str,
    parts: int = 1,
    stages: int = 1,
    *,
    layers: str | None = None,
    mode: NumericMode | None = None,
    ops: OpSet | None = None,
    isa: str | None = None,
    eager: bool = False,
) -> Any:
    """The model on `parts` x `stages` native devices of one thread each; with `ops`, on torch devices."""
    files = files_of(model)
    grid = RankGrid(parts, stages)
    devices: list[Device] = []
    for index in range(grid.num_ranks):
        settings = DeviceSettings("cpu", dtype, enforce_eager=eager, rank=grid.rank(index), pipeline_layers=layers)
        if ops is None:
            devices.append(NativeDevice(settings, isa=isa, threads=1))
        else:
            devices.append(TorchDevice(settings, ops=ops, mode=mode))
        devices[-1].load(files, show=False)
    return Replica(devices, grid)
