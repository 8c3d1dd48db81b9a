"""Reductions over the vocabulary, in tiles of one size, so that a row's bits do not depend on the other rows."""

from __future__ import annotations

import math

import torch

VOCAB_TILE = 512


def row_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) of logits [rows, vocab] float32 -> [rows] float32. -inf entries count as nothing.

    A row of -inf gives -inf.
    """
    highest = logits.amax(dim=-1, keepdim=True)
    # Without a finite maximum there is nothing to shift by; -inf - -inf would be NaN.
    shift = torch.where(torch.isfinite(highest), highest, torch.zeros_like(highest))
    return _sum_in_tiles(torch.exp(logits - shift)).log_().add_(shift.squeeze(-1))


def row_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """logits - logsumexp(logits) for logits [rows, vocab] float32, in float32. Rows hold at least one finite entry."""
    return logits - row_logsumexp(logits).unsqueeze(-1)


def _sum_in_tiles(values: torch.Tensor) -> torch.Tensor:
    """Sums of [rows, vocab] -> [rows]: first inside tiles, then over the tiles' sums, in one order.

    Two tiles at least: torch splits a reduction with a single result over threads.
    """
    rows, vocab = values.shape
    tiles = max(2, math.ceil(vocab / VOCAB_TILE))
    padded = torch.nn.functional.pad(values, (0, tiles * VOCAB_TILE - vocab))
    return padded.view(rows, tiles, VOCAB_TILE).sum(-1).sum(-1)
