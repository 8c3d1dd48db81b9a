"""One choice: order of tokens, stops, log-probabilities, and independence of how tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.logprobs import TokenGap
from evensong.engine.frontend.output_state import ChoiceState
from evensong.protocol.output import EngineCoreOutput, FinishReason, TokenLogprobs
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, byte_ids, byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer())


def choice(params: SamplingParams | None = None) -> ChoiceState:
    return ChoiceState(0, EngineCoreRequest("a", [20], params or SamplingParams(max_tokens=200)), TEXTS)


def out(start: int, ids: list[int], finish: FinishReason | None = None, **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput("a", 0, start, ids, finish_reason=finish, **fields)  # type: ignore[arg-type]


def feed(state: ChoiceState, ids: list[int], cuts: list[int], finish: FinishReason = FinishReason.LENGTH) -> None:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    for low, high in zip(edges, edges[1:], strict=False):
        if not state.finished:
            state.accept(out(low, ids[low:high], finish if high == len(ids) else None))


@given(
    st.text(alphabet="ab👍é", max_size=12),
    st.lists(st.integers(1, 40), max_size=8),
    st.lists(st.sampled_from(["ab", "b👍", "éé", "aab"]), max_size=3),
    st.booleans(),
    st.integers(0, 6),
)
@settings(max_examples=300, deadline=None)
def test_chunking_cannot_matter(text: str, cuts: list[int], stops: list[str], include: bool, min_tokens: int) -> None:
    ids = byte_ids("x" + text)
    params = SamplingParams(max_tokens=200, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    whole, parts = choice(params), choice(params)
    feed(whole, ids, [])
    deltas = []
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    for low, high in zip(edges, edges[1:], strict=False):
        if not parts.finished:
            parts.accept(out(low, ids[low:high], FinishReason.LENGTH if high == len(ids) else None))
            deltas.append(parts.output(delta=True))
    assert whole.output(delta=False) == parts.output(delta=False)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids


def test_stop_string_cuts_text_and_tokens() -> None:
    state = choice(SamplingParams(stop=["lo w"], max_tokens=50))
    assert state.accept(out(0, byte_ids("hello world"))) == 7
    assert (state.text, state.token_ids) == ("hel", byte_ids("hello w"))
    assert (state.finish_reason, state.stop_reason) == ("stop", "lo w")


def test_stop_string_stays_when_asked() -> None:
    state = choice(SamplingParams(stop="lo w", include_stop_str_in_output=True, max_tokens=50))
    state.accept(out(0, byte_ids("hello world")))
    assert state.text == "hello w"


def test_stop_inside_a_token_drops_the_rest_of_it() -> None:
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    pair = tokenizer.token_to_id("w900")
    if pair is None:  # any token of several characters will do
        pair = next(i for i in range(266, 1000) if (tokenizer.id_to_token(i) or "").startswith("w"))
    word = tokenizer.decode([pair])
    state = ChoiceState(0, EngineCoreRequest("a", [20], SamplingParams(stop=[word[:2]], max_tokens=9)), texts)
    state.accept(out(0, [*byte_ids("x"), pair]))
    assert (state.text, state.token_ids) == ("x", [*byte_ids("x"), pair])


def test_min_tokens_hold_off_a_stop_string() -> None:
    state = choice(SamplingParams(stop="a", min_tokens=3, max_tokens=9))
    state.accept(out(0, byte_ids("aaaa")))
    assert (state.text, len(state.token_ids)) == ("aaa", 4)


def test_held_text_comes_with_the_end() -> None:
    state = choice(SamplingParams(stop="abc", max_tokens=9))
    state.accept(out(0, byte_ids("xab")))
    assert state.output(delta=True).text == "x"
    state.accept(out(3, [], FinishReason.ABORT))
    last = state.output(delta=True)
    assert (last.text, last.finish_reason) == ("ab", "abort")


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ended_it_has_no_text_unless_asked(include: bool) -> None:
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include, max_tokens=9)
    state = choice(params)
    state.accept(out(0, [*byte_ids("hi"), EOS_TOKEN_ID], FinishReason.STOP))
    assert state.text == ("hi<s1>" if include else "hi")
    assert state.token_ids == [*byte_ids("hi"), EOS_TOKEN_ID]
    assert (state.finish_reason, state.stop_reason) == ("stop", None)


def test_a_last_token_by_length_has_text() -> None:
    state = choice()
    state.accept(out(0, byte_ids("hi"), FinishReason.LENGTH))
    assert (state.text, state.finish_reason) == ("hi", "length")


def test_stop_token_id_is_the_reason() -> None:
    state = choice(SamplingParams(stop_token_ids=[30], max_tokens=9))
    state.accept(out(0, [*byte_ids("hi"), 30], FinishReason.STOP, stop_reason=30))
    assert (state.text, state.stop_reason) == ("hi", 30)


def test_tokens_that_are_here_are_compared_and_dropped() -> None:
    state = choice()
    state.accept(out(0, byte_ids("abc")))
    assert state.accept(out(1, byte_ids("bcd"))) == 1
    assert (state.text, state.num_violations) == ("abcd", 0)
    assert state.accept(out(0, byte_ids("abX"))) == 0
    assert (state.text, state.num_violations) == ("abcd", 1)


def test_a_gap_is_an_error() -> None:
    state = choice()
    state.accept(out(0, byte_ids("a")))
    with pytest.raises(TokenGap):
        state.accept(out(2, byte_ids("c")))


def test_without_detokenizing_there_is_no_text() -> None:
    state = choice(SamplingParams(detokenize=False, max_tokens=9))
    state.accept(out(0, byte_ids("abc"), FinishReason.LENGTH))
    assert (state.text, state.token_ids) == ("", byte_ids("abc"))


def test_logprobs_follow_the_tokens() -> None:
    state = choice(SamplingParams(logprobs=2, max_tokens=9, stop="b"))
    ids = byte_ids("abc")
    rows = [TokenLogprobs([token, token + 1, token], [-1.0, -0.5, -1.0], 2) for token in ids]
    state.accept(out(0, ids, new_logprobs=rows))
    assert state.logprobs is not None
    assert len(state.logprobs) == len(state.token_ids) == 2
    assert state.cumulative_logprob == -2.0
    first = state.logprobs[0]
    assert list(first) == [ids[0], ids[0] + 1]
    assert (first[ids[0]].rank, first[ids[0]].decoded_token) == (2, "a")
    assert (first[ids[0] + 1].rank, first[ids[0] + 1].decoded_token) == (1, "b")
    delta = state.output(delta=True)
    assert delta.logprobs == state.logprobs
    assert state.output(delta=True).logprobs == []


def test_a_sampled_token_outside_the_best_keeps_its_rank() -> None:
    state = choice(SamplingParams(logprobs=1, max_tokens=9))
    state.accept(out(0, [50], new_logprobs=[TokenLogprobs([50, 60], [-9.0, -0.1], 321)]))
    assert state.logprobs is not None
    assert {token: item.rank for token, item in state.logprobs[0].items()} == {50: 321, 60: 1}
