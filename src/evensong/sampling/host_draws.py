"""Draws by NumPy and torch, for devices without native kernels; the oracle of those (tests/unit/kernels/cpu)."""

from __future__ import annotations

from collections.abc import Sequence

from evensong.protocol.output import TokenLogprobs
from evensong.sampling import filters, gumbel
from evensong.sampling.logprobs import token_logprobs
from evensong.sampling.row import Float32, SamplingRow
from evensong.sampling.sampler import Draws, Sampled, sample_row


class HostDraws(Draws):
    """Each step in its own file: filters in their order, then noise."""

    def draw(self, logits: Float32, row: SamplingRow) -> int:
        candidates = filters.scale(row.params, logits)
        for keep_some in filters.ORDER:
            keep_some(row.params, candidates)
        return gumbel.sample(candidates, row.params.seed or 0, row.position)

    def logprobs(self, logits: Float32, token_id: int, count: int, asked: Sequence[int]) -> TokenLogprobs:
        return token_logprobs(logits, token_id, count, asked)


def sample_rows(logits: Float32, rows: Sequence[SamplingRow], num_token_ids: int) -> list[Sampled]:
    """One token per row of `logits` [num_rows, padded_vocab_size].

    Columns from `num_token_ids` on pad the vocabulary: they are cut off here and can never be sampled.
    """
    real, draws = logits[:, :num_token_ids], HostDraws()
    return [sample_row(real[index], row, draws) for index, row in enumerate(rows)]
