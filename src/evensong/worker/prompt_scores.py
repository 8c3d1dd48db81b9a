"""Log-probabilities of prompts, from the hidden states of the step that computes them.

Logits are made for a few rows at a time, so that memory does not grow with the prompt; a row's bits do not depend on
how many are made together, nor on the chunk, the batch or the attempt that it is computed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evensong.protocol.output import PromptScores
from evensong.protocol.step import SchedulerOutput
from evensong.worker.device import DeviceStep, NotFiniteError
from evensong.worker.slots import SlotTable

NOT_FINITE = "the log-probabilities of the prompt cannot be computed: the model's logits are not finite"


@dataclass(frozen=True)
class Wanted:
    """Positions of a prompt from `start` on: their tokens, and the rows of the step that give their probabilities."""

    request_id: str
    start: int
    rows: range
    token_ids: Sequence[int]
    num_best: int


def wanted_scores(plan: SchedulerOutput, slots: SlotTable) -> list[Wanted]:
    """What the plan's requests asked for of its rows. Called before the slots' computed counts move on."""
    wanted = []
    first_row = 0
    for request_id, count in plan.num_scheduled_tokens.items():
        slot = slots[request_id]
        scored = slot.rows_to_score(count) if slot.scores_prompt else range(0)
        if scored:
            row = first_row + scored.start - slot.num_computed_tokens
            token_ids = slot.tokens[scored.start + 1 : scored.stop + 1].tolist()
            rows = range(row, row + len(scored))
            wanted.append(Wanted(request_id, scored.start + 1, rows, token_ids, slot.params.prompt_logprobs or 0))
        first_row += count
    return wanted


def score_prompts(step: DeviceStep, wanted: Sequence[Wanted]) -> tuple[dict[str, PromptScores], dict[str, str]]:
    """The scores of a step that has run, and what failed, by request id; nothing has started since."""
    scores: dict[str, PromptScores] = {}
    errors: dict[str, str] = {}
    for one in wanted:
        try:
            scores[one.request_id] = PromptScores(one.start, step.score(one.rows, one.token_ids, one.num_best))
        except NotFiniteError:
            errors[one.request_id] = NOT_FINITE
    return scores, errors
