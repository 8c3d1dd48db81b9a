"""LogitsProcessor: what an operator's own code implements to change logits (docs/sampling.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, Int64
from evensong.sources.tokenizer import Tokenizer


@dataclass(frozen=True)
class ProcessorConfig:
    """What a processor is told when it is made. Token ids run from 0 to `num_token_ids` - 1."""

    model: str
    num_token_ids: int
    tokenizer: Tokenizer


@dataclass(frozen=True)
class RequestView:
    """One request at the position that is to be sampled. The token ids are read-only arrays."""

    params: SamplingParams
    extra_args: dict[str, Any]
    prompt_token_ids: Int64
    output_token_ids: Int64


class LogitsProcessor(ABC):
    """Changes the logits of the requests that want it. Made once, in the worker, and asked row by row.

    It keeps nothing between calls: what it does at a position depends on its `RequestView` and the logits alone. So a
    request gets the same bytes alone or in a crowd, after a preemption, and resumed elsewhere: that is its author's
    part of the contract. What it raises ends its own request alone.
    """

    def __init__(self, config: ProcessorConfig) -> None:
        self.config = config

    @abstractmethod
    def wanted(self, params: SamplingParams) -> bool:
        """Whether it acts on a request with these settings, for which it usually looks into `params.extra_args`."""

    def check(self, params: SamplingParams) -> None:  # noqa: B027 - nothing to check is a fair default
        """Called once for each request that wants it, before admission; ValueError refuses the request with a 400."""

    @abstractmethod
    def apply(self, view: RequestView, logits: Float32) -> None:
        """Changes the raw float32 `logits` [num_token_ids] in place. -inf forbids a token; NaN and +inf are errors."""
