"""ReasoningGate: where constraints begin, and budgets."""

from __future__ import annotations

from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import ReasoningSpec
from evensong.scheduler.grammar.reasoning import ReasoningGate
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.scheduler.grammar.vocabulary import Vocabulary, has_bit
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, FIRST_BYTE, byte_ids, byte_tokenizer
from tests.unit.scheduler.grammar.matching import allowed, compiled, next_texts, request_grammar, say, vocabulary

OPEN = ReasoningSpec("</think>", byte_ids("</think>"))
UNDECIDED = ReasoningSpec("</think>", byte_ids("</think>"), byte_ids("<think>"))


def test_the_grammar_begins_behind_the_end_of_the_reasoning() -> None:
    state = request_grammar(compiled(regex="ab"), reasoning=OPEN)
    for text in ("I think </thin", "that "):
        say(state, text)
        assert {"a", "z", "<"} <= (next_texts(state) or set())
    say(state, "</think>")
    assert next_texts(state) == {"a"}


def test_nothing_ends_an_output_that_still_reasons() -> None:
    state = request_grammar(compiled(regex="ab"), reasoning=OPEN, stop_token_ids=byte_ids("!"))
    row = vocabulary().new_row()
    assert state.fill(row)
    assert not {EOS_TOKEN_ID, *byte_ids("!")} & allowed(row)


def test_tokens_that_end_the_reasoning_and_say_more_are_forbidden() -> None:
    made = Vocabulary(byte_tokenizer, 300)
    made.token_bytes = [*vocabulary().token_bytes[:300]]
    made.token_bytes[297:300] = [b"</thi", b"nk>", b"nk>{"]
    reasoning = ReasoningSpec("</think>", byte_ids("</think>"))
    asked = EngineCoreRequest("a", [1], SamplingParams(seed=1), eos_token_ids=[EOS_TOKEN_ID], reasoning=reasoning)
    state = RequestGrammar(asked, compiled(regex="x").start(), made, ReasoningGate(reasoning, None, made))
    row = made.new_row()
    for token_id, allowed_then in ((FIRST_BYTE + ord("a"), True), (297, False)):
        state.accept(token_id)
        assert state.fill(row) and has_bit(row, 298)
        assert has_bit(row, 299) == allowed_then
    state.accept(298)
    assert state.fill(vocabulary().new_row())


def test_a_budget_ends_it_with_the_marker() -> None:
    state = request_grammar(compiled(regex="ab"), reasoning=OPEN, thinking_token_budget=3)
    say(state, "abc")
    for token_id in byte_ids("</think>"):
        row = vocabulary().new_row()
        assert state.fill(row) and allowed(row) == {token_id}
        state.accept(token_id)
    assert next_texts(state) == {"a"}


def test_a_budget_works_without_a_grammar_and_is_not_needed_for_short_thoughts() -> None:
    state = request_grammar(None, reasoning=OPEN, thinking_token_budget=20)
    assert next_texts(state) is None
    say(state, "ok</think>answer, and more than twenty tokens of it")
    assert next_texts(state) is None
    state = request_grammar(None, reasoning=OPEN, thinking_token_budget=0)
    assert next_texts(state) == {"<"}


def test_an_output_that_may_reason_begins_with_either() -> None:
    state = request_grammar(compiled(regex="ab"), reasoning=UNDECIDED)
    assert next_texts(state) == {"a", "<"}
    say(state, "a")
    assert next_texts(state) == {"b"}
    state = request_grammar(compiled(regex="ab"), reasoning=UNDECIDED, output="<")
    assert next_texts(state) == {"t"}
    say(state, "think>hm</think>")
    assert next_texts(state) == {"a"}


def test_a_state_in_the_reasoning_is_rebuilt() -> None:
    text = "<think>hm</think>ab"
    for cut in range(len(text) + 1):
        whole = request_grammar(compiled(regex="ab"), reasoning=UNDECIDED, thinking_token_budget=1)
        resumed = request_grammar(compiled(regex="ab"), reasoning=UNDECIDED, thinking_token_budget=1, output=text[:cut])
        say(whole, text[:cut])
        assert next_texts(whole) == next_texts(resumed), cut


def test_drafts_may_run_through_the_end_of_the_reasoning() -> None:
    state = request_grammar(compiled(regex="ab"), reasoning=OPEN, output="hm</think")
    rows = [vocabulary().new_row() for _ in range(4)]
    assert state.fill_positions(rows, byte_ids(">ab")) == 4
    assert {EOS_TOKEN_ID} == allowed(rows[3])
    assert {"z", ">"} <= (next_texts(state) or set())
    say(state, ">")
    assert next_texts(state) == {"a"}


def test_drafts_of_an_output_that_does_not_reason_are_rolled_back() -> None:
    state = request_grammar(compiled(regex="ab"), reasoning=UNDECIDED)
    rows = [vocabulary().new_row() for _ in range(3)]
    assert state.fill_positions(rows, byte_ids("ab")) == 3
    assert next_texts(state) == {"a", "<"}
    say(state, "a")
    assert next_texts(state) == {"b"}
