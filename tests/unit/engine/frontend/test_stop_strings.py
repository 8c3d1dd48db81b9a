"""Stop strings: the match that ends first, never leaked, never held longer than needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from evensong.engine.frontend.stop_strings import StopStrings


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: at each end, is some stop string complete?"""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    follower = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        shown += follower.push(piece)
        if follower.matched is not None:
            return shown, follower.matched
    return shown + follower.finish(), None


short_text = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.text(alphabet="abc", max_size=4), max_size=12), stop_lists, st.booleans())
@settings(max_examples=600, deadline=None)
def test_equals_the_definition_at_any_chunking(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == expected("".join(pieces), stops, include)


@given(short_text, stop_lists)
@settings(max_examples=300, deadline=None)
def test_holds_exactly_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    follower = StopStrings(stops, False)
    shown = ""
    for index, character in enumerate(text):
        shown += follower.push(character)
        if follower.matched is not None:
            return
        so_far = text[: index + 1]
        hold = max(n for stop in stops for n in range(len(stop)) if n == 0 or so_far.endswith(stop[:n]))
        assert shown == so_far[: len(so_far) - hold]


def test_without_stop_strings_nothing_waits() -> None:
    follower = StopStrings([], False)
    assert follower.push("anything") == "anything"
    assert follower.finish() == ""


def test_a_match_before_min_tokens_does_not_count() -> None:
    follower = StopStrings(["ab"], False)
    assert follower.push("xab", may_stop=False) == "xab"
    assert follower.push("ya") == "y"
    assert follower.push("b") == ""
    assert follower.matched == "ab"


def test_a_stop_that_begins_before_min_tokens_counts_when_it_ends_after() -> None:
    follower = StopStrings(["ab"], False)
    assert follower.push("xa", may_stop=False) == "x"
    assert follower.push("bc") == ""
    assert follower.matched == "ab"


def test_long_repetitive_text_is_linear() -> None:
    follower = StopStrings(["a" * 500 + "b"], False)
    shown = sum(len(follower.push("a")) for _ in range(20000))
    assert shown + len(follower.finish()) == 20000
