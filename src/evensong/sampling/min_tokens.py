"""min_tokens: until that many tokens exist, none that would end the request can be sampled."""

from __future__ import annotations

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, SamplingRow


def wanted(params: SamplingParams) -> bool:
    """True for a request with a least length."""
    return params.min_tokens > 0


def apply(row: SamplingRow, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place."""
    if len(row.output_token_ids) >= row.params.min_tokens:
        return
    ends = set(row.params.stop_token_ids or ())
    if not row.params.ignore_eos:
        ends.update(row.eos_token_ids)
    logits[[token_id for token_id in ends if token_id < len(logits)]] = -np.inf
