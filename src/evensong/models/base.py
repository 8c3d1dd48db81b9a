"""CausalLM: what the worker sees of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from evensong.layers.attention.metadata import AttentionMetadata
from evensong.protocol.kv_spec import LayerKVSpec


class CausalLM(ABC):
    """A loaded decoder model.

    `trial_results`, set by the loader, is a digest of what trial products gave at start-up: a machine whose libraries
    sum in another order has another one, and another fingerprint.
    """

    trial_results: str = ""

    @abstractmethod
    def kv_specs(self) -> list[LayerKVSpec]:
        """What each attention layer keeps per token."""

    @abstractmethod
    def set_max_model_len(self, max_model_len: int) -> None:
        """The fitted length: tables by position are made for it, and never depend on a sequence's current length."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """Float32 hidden states [num_tokens, hidden_size] before the last norm; token_ids and positions [num_tokens].

        kv_caches: one [num_slots + 1, 2 * num_kv_heads * head_dim] a layer; the step's keys and values are written.
        metadata: one a layer; layers that read the same blocks as far back share it.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 logits [rows, vocab_size], padded rows of the vocabulary included."""
