"""Penalties on tokens that occurred: repetition (prompt and output), presence and frequency (output).

Repetition: Keskar et al., "CTRL" (2019), equation in section 4.1; presence and frequency: the OpenAI API's definition.
"""

from __future__ import annotations

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, SamplingRow


def wanted(params: SamplingParams) -> bool:
    """True for a request with any penalty."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply(row: SamplingRow, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(
            np.concatenate([np.asarray(row.prompt_token_ids), np.asarray(row.output_token_ids)]).astype(np.int64)
        )
        seen = seen[seen < len(logits)]
        factor = np.float32(params.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        produced, counts = np.unique(np.asarray(row.output_token_ids, dtype=np.int64), return_counts=True)
        known = produced < len(logits)
        amount = np.float32(params.frequency_penalty) * counts[known].astype(np.float32)
        logits[produced[known]] -= amount + np.float32(params.presence_penalty)
