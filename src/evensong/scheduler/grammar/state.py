"""RequestGrammar: what one request's next token may be. Rebuilt from the tokens that it has produced."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from evensong.protocol.request import EngineCoreRequest
from evensong.scheduler.grammar.base import Bitmask, GrammarFault, Matcher
from evensong.scheduler.grammar.reasoning import ReasoningGate
from evensong.scheduler.grammar.vocabulary import Vocabulary, clear_bits, has_bit, set_bits
from evensong.utils.logging import get_logger

logger = get_logger(__name__)


class RequestGrammar:
    """The grammar, behind the reasoning if there is some, and the tokens that may end the output.

    Those are forbidden until the grammar is satisfied, and allowed from then on; where nothing can follow, nothing else
    is. With `ignore_eos` EOS is allowed only there.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        matcher: Matcher | None,
        vocabulary: Vocabulary,
        gate: ReasoningGate | None = None,
    ) -> None:
        params = request.params
        size = vocabulary.size
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._gate = gate
        self._eos_ids = [i for i in request.eos_token_ids if 0 <= i < size]
        self._stop_ids = [i for i in params.stop_token_ids or () if i < size]
        self._ends = frozenset(self._eos_ids + self._stop_ids)
        self._ignore_eos = params.ignore_eos
        # Why it cannot go on; the request ends with that.
        self.fault: str | None = None
        self._replay(request.output_token_ids)

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return self._vocabulary.num_words

    def fill(self, row: Bitmask) -> bool:
        """Writes the mask of the next token; False, with nothing written, where any token may come.

        A grammar that cannot be followed is noted in `fault`.
        """
        try:
            gate = self._gate
            if gate is not None and not gate.open:
                return self._fill_reasoning(gate, row)
            if self._matcher is None:
                return False
            self._fill_content(self._matcher, row)
        except BaseException as error:
            self.fault = _fault_of(error)
            return False
        return True

    def fill_positions(self, rows: Sequence[Bitmask], draft_token_ids: Sequence[int]) -> int:
        """The masks of the next position and of those behind each draft token; how many were written.

        They end at a draft that may not come. The state is as before afterwards.
        """
        assert len(rows) == len(draft_token_ids) + 1
        gate, num_accepted, written = copy.copy(self._gate), 0, 0
        matcher = self._matcher
        for row, draft in zip(rows, [*draft_token_ids, None], strict=True):
            if not self.fill(row):
                if self.fault is not None:
                    break
                row[:] = self._vocabulary.full_row
            written += 1
            if draft is None or not has_bit(row, draft) or draft in self._ends:
                break
            num_accepted += self.accept(draft)
        self._gate = gate
        if matcher is not None and num_accepted:
            matcher.rollback(num_accepted)
        return written

    def accept(self, token_id: int) -> bool:
        """A token of the output; True if it went to the grammar. One that does not fit is noted in `fault`."""
        if token_id in self._ends:
            return False
        gate = self._gate
        if gate is not None and not gate.open:
            was_undecided = gate.undecided
            gate.accept(token_id)
            if not (was_undecided and gate.open):
                return False  # a token of the reasoning; else the first one of an output without any
        if self._matcher is None:
            return False
        try:
            if not self._matcher.accept(token_id):
                self.fault = f"token {token_id} does not fit the grammar"
        except BaseException as error:
            self.fault = _fault_of(error)
        return True

    def _replay(self, token_ids: Sequence[int]) -> None:
        """The tokens that the request came with. Masks are made as they were: they are part of what limits count."""
        row = self._vocabulary.new_row()
        for token_id in token_ids:
            self.fill(row)
            self.accept(token_id)

    def _fill_reasoning(self, gate: ReasoningGate, row: Bitmask) -> bool:
        forced = gate.forced_token
        if forced is not None:
            row.fill(0)
            set_bits(row, [forced])
            return True
        if self._matcher is None:
            return False
        if gate.undecided:
            self._fill_content(self._matcher, row)
            set_bits(row, [gate.start_token])
            return True
        row[:] = self._vocabulary.full_row
        # An output that ended here would not be what was asked for.
        clear_bits(row, self._ends)
        clear_bits(row, gate.tokens_past_end)
        return True

    def _fill_content(self, matcher: Matcher, row: Bitmask) -> None:
        may_end = matcher.fill(row)
        clear_bits(row, self._ends)
        if may_end:
            set_bits(row, self._stop_ids)
            if not (self._ignore_eos and row.any()):
                set_bits(row, self._eos_ids)


def _fault_of(error: BaseException) -> str:
    """What ends the request alone: a limit, or a bug of a library's. A panic of one's in Rust is no Exception."""
    if isinstance(error, GrammarFault):
        return str(error)
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    logger.error("a grammar library failed", exc_info=error)
    return f"{type(error).__name__}: {error!s:.200}"
