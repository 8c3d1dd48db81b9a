"""allowed_token_ids: no other token can be sampled."""

from __future__ import annotations

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, SamplingRow


def wanted(params: SamplingParams) -> bool:
    """True for a request that names its tokens."""
    return params.allowed_token_ids is not None


def apply(row: SamplingRow, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place."""
    ids = np.asarray(row.params.allowed_token_ids or (), dtype=np.int64)
    ids = ids[ids < len(logits)]
    kept = logits[ids]
    logits.fill(-np.inf)
    logits[ids] = kept
