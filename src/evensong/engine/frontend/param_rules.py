"""What a model and a server make of SamplingParams: limits, token ids, and what is set from the model."""

from __future__ import annotations

from collections.abc import Sequence

from evensong.engine.frontend.bad_words import bad_word_token_ids, check_something_is_left
from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.tokenizer import Tokenizer


class ParamRules:
    """For one model. Token ids run to `num_token_ids`; `eos_token_ids` end an output; `max_n` bounds its choices."""

    def __init__(
        self, tokenizer: Tokenizer, num_token_ids: int, eos_token_ids: Sequence[int], max_logprobs: int, max_n: int
    ) -> None:
        self.num_token_ids = num_token_ids
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._max_logprobs = max_logprobs
        self.max_n = max_n

    def resolve(self, given: SamplingParams) -> SamplingParams:
        """A copy with what depends on the model. Raises RequestError for settings that it cannot serve."""
        if not isinstance(given, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {given!r:.60}", param="sampling_params")
        # Checked again: a user may have set a field of the original to anything since it was made.
        params = given.clone()
        if params.n > self.max_n:
            raise RequestError(f"n must be at most {self.max_n}, got {params.n}", param="n")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, name)) is not None and count > self._max_logprobs:
                raise RequestError(f"{name} must be at most {self._max_logprobs}, got {count}", param=name)
        self.check_token_ids(params.stop_token_ids or [], "stop_token_ids")
        self.check_token_ids(list(params.logit_bias or ()), "logit_bias")
        self.check_token_ids(params.logprob_token_ids or [], "logprob_token_ids")
        if params.allowed_token_ids is not None:
            self.check_token_ids(params.allowed_token_ids, "allowed_token_ids")
            params.allowed_token_ids = sorted(set(params.allowed_token_ids))
        words = params.bad_words
        params.bad_words_token_ids = bad_word_token_ids(self._tokenizer, words) if words else None
        check_something_is_left(params, self._eos_token_ids)
        return params

    def check_token_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises RequestError when a token id is not one of the vocabulary's."""
        # Only a list that holds a mistake is walked through in Python.
        if set(map(type, token_ids)) <= {int} and (
            not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.num_token_ids
        ):
            return
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(f"{field} holds {token_id!r:.40}, which is not a token id", param=field)
            if not 0 <= token_id < self.num_token_ids:
                shown = token_id if abs(token_id) < 2**80 else "a number of over 80 bits"
                raise RequestError(
                    f"{field} holds {shown}; token ids of this model are 0 to {self.num_token_ids - 1}", param=field
                )
