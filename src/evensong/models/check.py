"""Whether a model's files are what its family needs, before anything is packed or allocated."""

from __future__ import annotations

from collections.abc import Mapping

from evensong.kernels.interface import Builder, Norm, Weight
from evensong.models.loader import build_model
from evensong.sources.model_description import ModelDescription
from evensong.sources.tensor_check import check_tensors
from evensong.sources.weights import Weights


def check_model(description: ModelDescription, weights: Weights) -> None:
    """Raises one ConfigError that names the first tensor that is missing, surplus or not as expected."""
    names = NamingBuilder()
    build_model(description, names)
    # A head that is the embedding's may be stored all the same.
    check_tensors(names.expected, weights, ("lm_head.weight",) if description.tie_word_embeddings else ())


class NamingBuilder(Builder):
    """Notes which tensors a model reads, and in which shapes; reads none."""

    def __init__(self) -> None:
        self.expected: dict[str, tuple[int, ...]] = {}

    def linear(self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, gated: bool = False) -> Weight:
        for name, size in parts.items():
            self.expected[f"{name}.weight"] = (size, in_features)
            if bias:
                self.expected[f"{name}.bias"] = (size,)
        return None

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        self.expected[name] = (size,)

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        self.expected.update({f"{name}.weight": (head_dim,) for name in parts})

    def table(self, name: str, rows: int, width: int) -> Weight:
        self.expected[name] = (rows, width)

    def head(self, table: Weight) -> Weight:
        return None
