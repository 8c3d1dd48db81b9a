"""logit_bias: adds a number to the logits of some tokens."""

from __future__ import annotations

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, SamplingRow


def wanted(params: SamplingParams) -> bool:
    """True for a request with a bias."""
    return bool(params.logit_bias)


def apply(row: SamplingRow, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place."""
    for token_id, amount in (row.params.logit_bias or {}).items():
        if token_id < len(logits):
            logits[token_id] += np.float32(amount)
