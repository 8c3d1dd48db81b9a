"""CausalLM: what the worker sees of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod

from evensong.kernels.interface import Ops, Value
from evensong.protocol.kv_spec import LayerKVSpec


class CausalLM(ABC):
    """A decoder model with its weights. It computes nothing by itself: `forward` and `logits` say it in ops."""

    @abstractmethod
    def kv_specs(self, dtype: str) -> list[LayerKVSpec]:
        """What each attention layer of this rank keeps per token, in a cache of `dtype`; by the model's numbers."""

    @abstractmethod
    def forward(self, ops: Ops) -> Value:
        """Float32 hidden states [num_tokens, hidden_size] after this rank's last layer."""

    @abstractmethod
    def logits(self, ops: Ops, hidden: Value) -> Value:
        """Float32 logits [rows, vocab_size] of rows of `hidden`, padded rows of the vocabulary included.

        For ranks that have the output head.
        """
