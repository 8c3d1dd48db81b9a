"""Whether an output has begun to repeat itself: one pattern of tokens again and again at its end."""

from __future__ import annotations

from collections.abc import Sequence

from evensong.protocol.sampling_params import RepetitionDetectionParams


def repeats(token_ids: Sequence[int], num_output_tokens: int, params: RepetitionDetectionParams) -> bool:
    """True when the last tokens of the output are a pattern of a given size, `min_count` times in a row.

    The output is the last `num_output_tokens` of `token_ids`. Called after every token.
    """
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > num_output_tokens:
            return False
        # Shifted by one pattern it is the same; most sizes differ in the very last token.
        if token_ids[-1] == token_ids[-1 - size] and token_ids[size - length :] == token_ids[-length:-size]:
            return True
    return False
