"""The grammar's mask: no token can be sampled whose bit is not set."""

from __future__ import annotations

import numpy as np

from evensong.sampling.row import Bitmask, Float32


def apply(bitmask: Bitmask, logits: Float32) -> None:
    """Changes `logits` [vocab_size] in place; `bitmask` is [num_words], of at least as many bits."""
    bits = np.unpackbits(bitmask.view(np.uint8), count=len(logits), bitorder="little")
    logits[bits == 0] = -np.inf
