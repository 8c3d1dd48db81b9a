"""Log-probabilities of prompts, from the hidden states of the step that computes them.

Logits are made for a few rows at a time, so that memory does not grow with the prompt; a row's bits do not depend on
how many are made together (kernels/linear.py), nor on the chunk, the batch or the attempt that it is computed in.
"""

from __future__ import annotations

import numpy as np
import torch

from evensong.models.base import CausalLM
from evensong.protocol.output import PromptScores, TokenLogprobs
from evensong.protocol.step import SchedulerOutput
from evensong.sampling.logprobs import token_logprobs
from evensong.worker.slots import Slot, SlotTable

# Times the vocabulary, in float32: 13 MB for 50,000 tokens.
ROWS_AT_ONCE = 64

NOT_FINITE = "the log-probabilities of the prompt cannot be computed: the model's logits are not finite"


class NotFiniteError(ArithmeticError):
    """A row of logits holds NaN, or nothing that is finite."""


def score_prompts(
    model: CausalLM, hidden: torch.Tensor, plan: SchedulerOutput, slots: SlotTable, num_token_ids: int
) -> tuple[dict[str, PromptScores], dict[str, str]]:
    """What the plan's requests asked for of the rows in `hidden` [num_tokens, hidden_size], and what failed, by id.

    Called before the slots' computed counts move on.
    """
    scores: dict[str, PromptScores] = {}
    errors: dict[str, str] = {}
    first_row = 0
    for request_id, count in plan.num_scheduled_tokens.items():
        slot = slots[request_id]
        rows = slot.rows_to_score(count)
        if rows:
            try:
                own = hidden[first_row + rows.start - slot.num_computed_tokens :][: len(rows)]
                scores[request_id] = PromptScores(rows.start + 1, _score(model, own, slot, rows.start, num_token_ids))
            except NotFiniteError:
                errors[request_id] = NOT_FINITE
        first_row += count
    return scores, errors


def _score(model: CausalLM, hidden: torch.Tensor, slot: Slot, start: int, num_token_ids: int) -> list[TokenLogprobs]:
    """The tokens that follow the prompt's rows from `start` on, whose hidden states are `hidden` [num_rows, size]."""
    positions = []
    for first in range(0, len(hidden), ROWS_AT_ONCE):
        logits = model.compute_logits(hidden[first : first + ROWS_AT_ONCE])[:, :num_token_ids].cpu().numpy()
        for index, row in enumerate(logits, start + first):
            if not np.isfinite(row.max()):
                raise NotFiniteError
            positions.append(token_logprobs(row, int(slot.tokens[index + 1]), slot.params.prompt_logprobs or 0))
    return positions
