"""bad_words: a token that would complete a forbidden sequence in the output cannot be sampled."""

from __future__ import annotations

import numpy as np

from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.row import Float32, SamplingRow


def wanted(params: SamplingParams) -> bool:
    """True for a request with forbidden sequences."""
    return bool(params.bad_words_token_ids)


def apply(row: SamplingRow, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place. Only the output counts: a prompt may hold the beginning of a word."""
    output = row.output_token_ids
    banned = []
    for sequence in row.params.bad_words_token_ids or ():
        before = len(sequence) - 1
        if before > len(output) or sequence[-1] >= len(logits):
            continue
        # From the end: most sequences differ in the first token that is looked at.
        if all(output[-back] == sequence[before - back] for back in range(1, before + 1)):
            banned.append(sequence[-1])
    logits[banned] = -np.inf
