"""What sampled rows ask of the native sampler, as the bytes of SampleRow in native/src/step.h."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from evensong.sampling.row import SamplingRow
from evensong.sampling.sampler import changes_logits

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Masks = np.ndarray[Any, np.dtype[np.uint32]]

# temperature, top_p, min_p, top_k, seed, position, token, kind, num_best, feed_slot, mask
_ROW = struct.Struct("=dddqQQqiiii")
_LOGITS, _DRAW, _GIVEN = 0, 1, 2
_SEED_BITS = 0xFFFFFFFFFFFFFFFF
_NO_TOKEN = _NO_SLOT = _NO_LOGPROBS = _NO_MASK = -1


def rows_of(rows: Sequence[SamplingRow]) -> Bytes:
    """A token for each row; logits alone for those that change them before they draw.

    Masks are numbered in the order of the rows that have one and draw natively, as `masks_of` has them.
    """
    numbers = itertools.count()
    return _joined(_row_of(row, next(numbers) if draws_masked(row) else _NO_MASK) for row in rows)


def masks_of(rows: Sequence[SamplingRow]) -> Masks | None:
    """The masks [num_masks, num_words] of rows that draw natively; None where there are none."""
    masks = [row.bitmask for row in rows if draws_masked(row)]
    return np.stack([mask for mask in masks if mask is not None]) if masks else None


def draws_masked(row: SamplingRow) -> bool:
    """Whether the native sampler applies a mask to the row."""
    return row.bitmask is not None and not row_changes_logits(row)


def given_rows(token_ids: Sequence[int], num_best: int) -> Bytes:
    """Log-probabilities of these tokens, one a row, and of the best at each row."""
    return _joined(
        _ROW.pack(0.0, 1.0, 0.0, 0, 0, 0, token_id, _GIVEN, num_best, _NO_SLOT, _NO_MASK) for token_id in token_ids
    )


def logits_rows(count: int) -> Bytes:
    """Nothing but logits."""
    return _joined(
        _ROW.pack(0.0, 1.0, 0.0, 0, 0, 0, _NO_TOKEN, _LOGITS, _NO_LOGPROBS, _NO_SLOT, _NO_MASK) for _ in range(count)
    )


def row_changes_logits(row: SamplingRow) -> bool:
    """Whether the sampler's Python steps have to see the row's logits."""
    return changes_logits(row.params) if row.changes_logits is None else row.changes_logits


def _row_of(row: SamplingRow, mask: int) -> bytes:
    params = row.params
    count = params.num_logprobs
    return _ROW.pack(
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        (params.seed or 0) & _SEED_BITS,
        row.position,
        _NO_TOKEN,
        _LOGITS if row_changes_logits(row) else _DRAW,
        _NO_LOGPROBS if count is None else count,
        row.feed_slot,
        mask,
    )


def _joined(rows: Iterable[bytes]) -> Bytes:
    return np.frombuffer(b"".join(rows), dtype=np.uint8)
