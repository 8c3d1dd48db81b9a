"""Reads a model's tensors, in the order of its declarations, dequantising ahead of whoever packs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from evensong.kernels.interface import Builder, Float32, Spans
from evensong.models.base import CausalLM
from evensong.models.registry import model_class
from evensong.protocol.errors import ConfigError
from evensong.sources.dequant import dequantize
from evensong.sources.model_description import ModelDescription
from evensong.sources.weights import TensorEntry, Weights

# Called after each tensor.
Progress = Callable[[], object]
# Tensors that are dequantised ahead of the one being packed: bounds memory, keeps the second core busy.
_AHEAD = 12


class TensorReader:
    """Hands out tensors by name, dequantising the next ones in a second thread. A context: the thread ends with it.

    `ahead`: what will be asked for, in this order (check_model gives it). Of a tensor only what is asked for is read.
    """

    def __init__(self, weights: Weights, ahead: Mapping[str, Spans], progress: Progress | None = None) -> None:
        self._weights = weights
        self._progress = progress
        self._ahead = list(ahead.items())
        self._next = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dequantize")
        self._ready: dict[tuple[str, Spans], Future[Float32]] = {}
        self.read: set[str] = set()

    def __call__(self, name: str, spans: Spans) -> Float32:
        """What `spans` say of the tensor, as float32. Raises ConfigError when it is missing or has another shape."""
        entry = self._weights.get(name)
        if entry is None:
            raise ConfigError(f"the model's files hold no tensor {name}")
        shape = [span.total for span in spans]
        if list(entry.shape) != shape:
            raise ConfigError(f"the tensor {name} has shape {list(entry.shape)}, expected {shape}")
        future = self._ready.pop((name, spans), None)
        self._look_ahead(name)
        values = _read(entry, spans) if future is None else future.result()
        self.read.add(name)
        if self._progress is not None:
            self._progress()
        return values

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _look_ahead(self, current: str) -> None:
        """Starts on the tensors that follow."""
        while len(self._ready) < _AHEAD and self._next < len(self._ahead):
            name, spans = self._ahead[self._next]
            self._next += 1
            if name != current and name in self._weights:
                self._ready[name, spans] = self._pool.submit(_read, self._weights[name], spans)


def _read(entry: TensorEntry, spans: Spans) -> Float32:
    rows, *columns = (None if span.is_whole else span.ranges for span in spans)
    return dequantize(entry, rows, columns[0] if columns else None)


def build_model(description: ModelDescription, builder: Builder) -> CausalLM:
    """The model, its weights taken from `builder`. Raises ConfigError for tensors that do not fit."""
    return model_class(description.family)(description, builder)
