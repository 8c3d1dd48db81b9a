"""What the scheduler tells the workers each step, and what comes back."""

from __future__ import annotations

import msgspec

from evensong.protocol.output import PromptScores, TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request that takes a slot this step: first scheduled, or back from preemption or another core.

    `block_ids` is its block table so far: block by block in order of position, those of all layer groups side by side.
    NULL_BLOCK stands where a group needs none.

    Of a prompt whose log-probabilities are asked for, those of the tokens after the first, `prompt_logprobs_delivered`
    of them are with the front end already.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    prompt_logprobs_delivered: int = 0


class CachedRequestData(msgspec.Struct, array_like=True, gc=False):
    """Requests that hold a slot already, as parallel lists: only what changed.

    `new_block_ids` continue the block tables. Blocks that a request gave back are not named: nothing reads them, as
    they lie before the window of every token that is still computed.
    """

    request_ids: list[str] = []
    new_block_ids: list[list[int]] = []
    num_computed_tokens: list[int] = []


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """The plan of one step.

    `num_scheduled_tokens` maps request ids to token counts, in row order (new requests and cached ones together).
    A request in `sampling_request_ids` computes its last known token this step, so its next token is sampled; that
    list is in row order too. `released_request_ids` lost their slot (finished, aborted or preempted) since the last
    plan; a request can be released and be new in one plan: release comes first. `block_copies` are pairs of blocks,
    from and to, of one layer group each: they are copied in this order before anything of the step is written.
    `awaits_bitmask`: some sampled rows are constrained, so that a bitmask follows before they can be sampled.
    """

    step_id: int
    new_requests: list[NewRequestData]
    cached_requests: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    sampling_request_ids: list[str]
    released_request_ids: list[str]
    block_copies: list[tuple[int, int]] = []
    awaits_bitmask: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens computed in this step by all requests."""
        return sum(self.num_scheduled_tokens.values())


class ModelOutput(msgspec.Struct, array_like=True, gc=False):
    """Tokens sampled in one step: parallel lists in the order of the plan's `sampling_request_ids`.

    Each request may have several tokens (speculation); `logprobs[i]` is None where none were asked for. A request in
    `errors` could not be sampled (for example, no logit is finite); it gets no token and ends with that error. One in
    `exhausted` ends without a token since its own settings forbid every token. `prompt_scores` are of requests of the
    plan, sampled or not.
    """

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    errors: dict[str, str] = {}
    exhausted: list[str] = []
    prompt_scores: dict[str, PromptScores] = {}


class GrammarBitmask(msgspec.Struct, array_like=True, gc=False):
    """Allowed tokens of constrained rows: `request_ids[i]`'s row of `words`, 32 tokens a word, little endian.

    An id that comes several times in a row names the positions behind each other that draft tokens are verified at.
    """

    request_ids: list[str]
    words: bytes
