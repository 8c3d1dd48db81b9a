"""Whether a model's files are what its family needs, before anything is packed or allocated."""

from __future__ import annotations

from collections.abc import Mapping

from evensong.distributed.split import Share, Span
from evensong.kernels.interface import Builder, Extent, Norm, Spans, Weight, bias_spans, linear_spans, span_of
from evensong.models.loader import build_model
from evensong.sources.model_description import ModelDescription
from evensong.sources.tensor_check import check_tensors
from evensong.sources.weights import Weights


def check_model(description: ModelDescription, weights: Weights, share: Share) -> dict[str, Spans]:
    """What the share reads of which tensors, in the model's order.

    Raises one ConfigError that names the first tensor, of the whole model, that is missing, surplus or not as expected.
    """
    whole, own = NamingBuilder(share.of_all_stages()), NamingBuilder(share)
    build_model(description, whole)
    # A head that is the embedding's may be stored all the same.
    check_tensors(whole.expected, weights, ("lm_head.weight",) if description.tie_word_embeddings else ())
    build_model(description, own)
    return own.spans


class NamingBuilder(Builder):
    """Notes which tensors a model has, in which whole shapes (`expected`), and what it reads of them; reads none."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        self.expected: dict[str, tuple[int, ...]] = {}
        self.spans: dict[str, Spans] = {}

    def linear(self, parts: Mapping[str, Extent], inputs: Extent, *, bias: bool = False, gated: bool = False) -> Weight:
        for name, spans in linear_spans(parts, inputs):
            self._note(name, spans)
        for name, spans in bias_spans(parts) if bias else ():
            self._note(name, spans, self.adds_bias(inputs))
        return None

    def norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        self._note(name, (Span.whole(size),))

    def head_norms(self, parts: Mapping[str, int], head_dim: int, offset: float = 0.0) -> Norm:
        for name in parts:
            self._note(f"{name}.weight", (Span.whole(head_dim),))

    def table(self, name: str, rows: Extent, width: int) -> Weight:
        self._note(name, (span_of(rows), Span.whole(width)))

    def head(self, table: Weight) -> Weight:
        return None

    def _note(self, name: str, spans: Spans, is_read: bool = True) -> None:
        self.expected[name] = tuple(span.total for span in spans)
        if is_read:
            self.spans[name] = spans
