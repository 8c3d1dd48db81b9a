"""ReasoningGate: constraints begin where a model has stopped reasoning, and a budget may end that early.

What ends it is a text. Where tokens split that text in an unusual way it ends all the same, so bytes are followed.
"""

from __future__ import annotations

from functools import lru_cache

from evensong.protocol.structured import ReasoningSpec
from evensong.scheduler.grammar.vocabulary import Vocabulary


@lru_cache(maxsize=16)
def _tokens_past(vocabulary: Vocabulary, marker: bytes) -> list[list[int]]:
    return vocabulary.tokens_past(marker)


class ReasoningGate:
    """Open once the reasoning is over. `budget`: tokens that it may take, None for no limit."""

    def __init__(self, spec: ReasoningSpec, budget: int | None, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._marker = spec.end.encode()
        self._past = _tokens_past(vocabulary, self._marker)
        self._start_ids = spec.start_token_ids
        self._end_ids = spec.end_token_ids
        self._budget = budget
        self._num_begun = 0  # tokens of the start that stand
        self._num_forced = 0  # tokens of the end that stand since the budget was used up
        self._num_tokens = 0
        self._tail = b""
        self._decided = not spec.start_token_ids
        self.open = False

    @property
    def undecided(self) -> bool:
        """True while the output may still begin with reasoning, or without."""
        return not self._decided and self._num_begun == 0

    @property
    def start_token(self) -> int:
        """What begins the reasoning, where that is undecided."""
        return self._start_ids[0]

    @property
    def forced_token(self) -> int | None:
        """The one token that may come next; None where there are others."""
        if not self._decided:
            return self._start_ids[self._num_begun] if self._num_begun else None
        if self._budget is not None and self._num_tokens >= self._budget:
            return self._end_ids[self._num_forced]
        return None

    @property
    def tokens_past_end(self) -> list[int]:
        """Tokens that would end the reasoning and begin what follows it."""
        return self._past[self._num_matched()]

    def accept(self, token_id: int) -> None:
        """A token of the output, up to the one that opens the gate."""
        if not self._decided:
            self._begin(token_id)
            return
        forced = self.forced_token
        self._num_tokens += 1
        self._tail += self._vocabulary.token_bytes[token_id]
        if self._marker in self._tail:
            self.open = True
        elif forced is not None:
            self._num_forced += 1
            self.open = self._num_forced == len(self._end_ids)
        self._tail = self._tail[-len(self._marker) :]

    def _begin(self, token_id: int) -> None:
        if token_id != self._start_ids[self._num_begun]:
            self.open = True  # it does not reason
            return
        self._num_begun += 1
        self._decided = self._num_begun == len(self._start_ids)

    def _num_matched(self) -> int:
        """How much of the end's text stands."""
        most = min(len(self._tail), len(self._marker) - 1)
        return next(n for n in range(most, -1, -1) if self._tail.endswith(self._marker[:n]))
