"""The best of many values, without sorting all of them."""

from __future__ import annotations

import numpy as np

from evensong.sampling.row import Float32, Float64, Int64

# Distances below the best value that are tried in turn: few values of a model's distribution lie within the first.
_LEVELS = (2.0, 4.0, 8.0, 16.0)


def best_indices(values: Float32 | Float64, count: int) -> Int64:
    """Indices of the `count` largest of `values` [n] (no NaN), largest first, lowest index on a tie."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    indices = _enough(values, count)
    some = values[indices]
    if len(some) > 4 * count:
        # Everything that ties with the last one stays, so that the sort can choose by index.
        kept = some >= np.partition(some, -count)[-count]
        indices, some = indices[kept], some[kept]
    # Stable: equal values stay in ascending index.
    best: Int64 = indices[np.argsort(-some, kind="stable")[:count]]
    return best


def _enough(values: Float32 | Float64, count: int) -> Int64:
    """Indices, in ascending order, of some best values, at least `count` of them."""
    if 4 * count < len(values):
        best = values.max()
        for distance in _LEVELS:
            near = values >= best - values.dtype.type(distance)
            if np.count_nonzero(near) >= count:
                return np.flatnonzero(near)
    return np.arange(len(values))
