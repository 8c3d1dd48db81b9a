"""Loads a model: the only place where stored tensors become torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from evensong.kernels.dispatch import ops_for
from evensong.kernels.mode import NumericMode
from evensong.layers.builder import Builder
from evensong.models.base import CausalLM
from evensong.models.registry import model_class
from evensong.protocol.errors import ConfigError
from evensong.sources.dequant import Float32, dequantize
from evensong.sources.model_config import ModelDescription
from evensong.sources.weights import Weights

# Called after each tensor.
Progress = Callable[[], object]
# Tensors that are dequantised ahead of the one being packed: bounds memory, keeps the second core busy.
_AHEAD = 12


class TensorReader:
    """Hands out tensors by name, dequantising the next ones in a second thread while one is packed."""

    def __init__(self, weights: Weights, progress: Progress | None) -> None:
        self._weights = weights
        self._progress = progress
        self._names = list(weights)
        self._next = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dequantize")
        self._ready: dict[str, Future[Float32]] = {}
        self.read: set[str] = set()

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as float32. Raises ConfigError when it is missing or has another shape."""
        entry = self._weights.get(name)
        if entry is None:
            raise ConfigError(f"the model's files hold no tensor {name}")
        if entry.shape != shape:
            raise ConfigError(f"the tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")
        future = self._ready.pop(name, None)
        self._look_ahead(name)
        values = dequantize(entry) if future is None else future.result()
        self.read.add(name)
        if self._progress is not None:
            self._progress()
        # Mapped files are read-only, which torch does not take.
        return torch.from_numpy(values if values.flags.writeable else np.array(values))

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _look_ahead(self, current: str) -> None:
        """Starts on the tensors that follow in the file, whose order is close to the model's."""
        while len(self._ready) < _AHEAD and self._next < len(self._names):
            name = self._names[self._next]
            self._next += 1
            if name != current and name not in self._ready:
                self._ready[name] = self._pool.submit(dequantize, self._weights[name])


@torch.inference_mode()
def load_model(
    description: ModelDescription,
    weights: Weights,
    mode: NumericMode,
    device: torch.device,
    progress: Progress | None = None,
) -> CausalLM:
    """The model, its weights packed for `device`. Raises ConfigError for missing, surplus or mis-shaped tensors."""
    reader = TensorReader(weights, progress)
    try:
        builder = Builder(reader, ops_for(device), mode, device)
        model = model_class(description.family)(description, builder)
        model.trial_results = builder.trial_results()
    finally:
        reader.close()
    surplus = set(weights) - reader.read - ({"lm_head.weight"} if description.tie_word_embeddings else set())
    if surplus:
        raise ConfigError(
            f"the model's files hold {len(surplus)} tensors that the {description.family} family does not have, "
            f"such as {min(surplus)}"
        )
    return model
