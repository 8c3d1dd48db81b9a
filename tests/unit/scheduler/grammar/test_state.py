"""RequestGrammar: when an output may end, and states that are rebuilt, drafted and rolled back."""

from __future__ import annotations

import json
import random

import pytest

from evensong.scheduler.grammar import limits
from evensong.scheduler.grammar.base import GrammarFault
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, FIRST_BYTE, byte_ids
from tests.unit.scheduler.grammar.matching import (
    allowed,
    compiled,
    next_texts,
    request_grammar,
    say,
    texts_of,
    vocabulary,
)

STOP = FIRST_BYTE + ord("!")


def test_eos_comes_only_where_the_grammar_is_satisfied() -> None:
    state = request_grammar(compiled(regex="ab*"))
    assert next_texts(state) == {"a"}
    say(state, "a")
    assert next_texts(state) == {"b", "EOS"}


def test_a_finished_grammar_allows_only_eos() -> None:
    state = request_grammar(compiled(choice=["yes", "no"]), output="yes")
    assert next_texts(state) == {"EOS"}
    state.accept(EOS_TOKEN_ID)
    assert state.fault is None


def test_stop_ids_are_forbidden_before_the_end_and_allowed_from_there_on() -> None:
    """Also one that the grammar would take."""
    state = request_grammar(compiled(regex="a!b"), stop_token_ids=[STOP])
    say(state, "a")
    assert next_texts(state) == set()
    state = request_grammar(compiled(regex="ab*"), stop_token_ids=[STOP], output="a")
    assert next_texts(state) == {"b", "!", "EOS"}


def test_with_ignore_eos_it_ends_only_where_nothing_can_follow() -> None:
    state = request_grammar(compiled(regex="a{1,2}"), ignore_eos=True, output="a")
    assert next_texts(state) == {"a"}
    say(state, "a")
    assert next_texts(state) == {"EOS"}


def test_the_tokens_so_far_give_the_same_state() -> None:
    grammar = compiled(json={"type": "object", "properties": {"a": {"enum": ["é", "日本"]}}, "required": ["a"]})
    text = '{"a": "日本"}'
    for cut in range(len(text) + 1):
        whole, resumed = request_grammar(grammar), request_grammar(grammar, output=text[:cut])
        say(whole, text[:cut])
        rows = [vocabulary().new_row(), vocabulary().new_row()]
        assert whole.fill(rows[0]) and resumed.fill(rows[1])
        assert allowed(rows[0]) == allowed(rows[1]), cut


def test_a_token_that_does_not_fit_is_a_fault() -> None:
    state = request_grammar(compiled(regex="a"))
    say(state, "b")
    assert state.fault is not None and "does not fit" in state.fault


def test_positions_behind_drafts_have_masks_and_the_state_stays() -> None:
    state = request_grammar(compiled(json={"type": "array", "items": {"type": "integer"}}))
    rows = [vocabulary().new_row() for _ in range(4)]
    assert state.fill_positions(rows, byte_ids("[1,")) == 4
    one_by_one = request_grammar(compiled(json={"type": "array", "items": {"type": "integer"}}))
    for row, token_id in zip(rows, [*byte_ids("[1,"), None], strict=True):
        expected = vocabulary().new_row()
        one_by_one.fill(expected)
        assert allowed(row) == allowed(expected)
        if token_id is not None:
            one_by_one.accept(token_id)
    # As before: the drafts were never said.
    assert "[" in (next_texts(state) or ())


def test_positions_end_at_a_draft_that_may_not_come() -> None:
    state = request_grammar(compiled(regex="abc"))
    rows = [vocabulary().new_row() for _ in range(4)]
    assert state.fill_positions(rows, byte_ids("axc")) == 2
    assert [texts_of(row) for row in rows[:2]] == [{"a"}, {"b"}]
    assert next_texts(state) == {"a"}


class PanicException(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    "error", [GrammarFault("too many items"), ZeroDivisionError("too many items"), PanicException("too many items")]
)
def test_what_a_library_raises_is_its_requests_fault(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def fill(self, row: object) -> bool:
            raise error

        def accept(self, token_id: int) -> bool:
            raise error

    for call in ("fill", "accept"):
        state = request_grammar(compiled(regex="a+"))
        monkeypatch.setattr(state, "_matcher", Broken())
        if call == "fill":
            assert not state.fill(vocabulary().new_row())
        else:
            state.accept(FIRST_BYTE)
        assert state.fault is not None and state.fault.endswith("too many items")


def test_ctrl_c_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def fill(self, row: object) -> bool:
            raise KeyboardInterrupt

    state = request_grammar(compiled(regex="a+"))
    monkeypatch.setattr(state, "_matcher", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        state.fill(vocabulary().new_row())


def test_json_comes_raw_in_any_script() -> None:
    value = "😀 日本 é"
    state = request_grammar(compiled(json={"const": value}))
    for token_id in byte_ids(json.dumps(value, ensure_ascii=False)):
        row = vocabulary().new_row()
        assert state.fill(row) and token_id in allowed(row)
        state.accept(token_id)
    assert next_texts(state) == {"EOS"}


def test_what_other_outputs_reached_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer's states are counted; an output must reach that limit, or not, whoever came before it."""
    monkeypatch.setitem(limits.LIMITS, "max_lexer_states", 400)
    grammar = compiled(regex="(a|b)*a(a|b){12}c")
    rng = random.Random(1)
    texts = ["".join(rng.choice("ab") for _ in range(400)) for _ in range(4)]

    def reach(text: str) -> int:
        state = request_grammar(grammar)
        row = vocabulary().new_row()
        for count, token_id in enumerate(byte_ids(text)):
            if not state.fill(row):
                return count
            state.accept(token_id)
        return len(text)

    alone = []
    for text in texts:
        grammar = compiled(regex="(a|b)*a(a|b){12}c")
        alone.append(reach(text))
    assert min(alone) < 400, "the limit is not reached: the test shows nothing"
    grammar = compiled(regex="(a|b)*a(a|b){12}c")
    assert [reach(text) for text in reversed(texts)] == alone[::-1]
    assert [reach(text) for text in texts] == alone
    # Nor does it matter where an output was taken up again.
    cut = min(alone) // 2
    text = texts[alone.index(min(alone))]
    resumed, row = request_grammar(grammar, output=text[:cut]), vocabulary().new_row()
    count = cut
    while resumed.fill(row):
        resumed.accept(byte_ids(text)[count])
        count += 1
    assert count == min(alone)
