"""Penalties on tokens that occurred: repetition (prompt and output), presence and frequency (output).

Repetition: Keskar et al., "CTRL" (2019), equation in section 4.1; presence and frequency: the OpenAI API's definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, Int64, SamplingRow


def wanted(params: SamplingParams) -> bool:
    """True for a request with any penalty."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply(row: SamplingRow, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        occurs = np.zeros(len(logits), dtype=bool)
        for token_ids in (row.prompt_token_ids, row.output_token_ids):
            occurs[_known(token_ids, len(logits))] = True
        seen = np.flatnonzero(occurs)
        factor = np.float32(params.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = np.bincount(_known(row.output_token_ids, len(logits)))
        produced = np.flatnonzero(counts)
        amount = np.float32(params.frequency_penalty) * counts[produced].astype(np.float32)
        logits[produced] -= amount + np.float32(params.presence_penalty)


def _known(token_ids: Sequence[int] | Int64, vocab_size: int) -> Int64:
    """The ids as an array, without those that have no logit."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[ids < vocab_size]
