"""Vocabulary: bits, and tokens that run past a marker."""

from __future__ import annotations

from evensong.scheduler.grammar.vocabulary import Vocabulary, clear_bits, has_bit, set_bits
from evensong.testing.byte_tokenizer import FIRST_BYTE, byte_tokenizer
from tests.unit.scheduler.grammar.matching import allowed, vocabulary


def test_a_full_row_has_every_token_and_not_the_end() -> None:
    row = vocabulary().full_row
    assert allowed(row) == set(range(vocabulary().size))
    assert not has_bit(row, vocabulary().end_id)
    assert not allowed(vocabulary().new_row())


def test_bits_are_set_and_cleared_one_by_one() -> None:
    row = vocabulary().new_row()
    set_bits(row, [0, 31, 32, 63, 100])
    assert allowed(row) == {0, 31, 32, 63, 100}
    clear_bits(row, [31, 32, 33])
    assert allowed(row) == {0, 63, 100}


def test_the_end_has_a_word_of_its_own_where_the_last_one_is_full() -> None:
    assert Vocabulary(byte_tokenizer, 64).num_words == 3
    assert Vocabulary(byte_tokenizer, 63).num_words == 2


def test_special_tokens_and_the_end_are_no_text() -> None:
    special = vocabulary().special_ids
    assert set(range(FIRST_BYTE)) <= set(special) and vocabulary().end_id in special
    assert FIRST_BYTE + ord("a") not in special


def test_tokens_past_a_marker_are_those_that_say_more_than_space() -> None:
    made = Vocabulary(byte_tokenizer, 8)
    made.token_bytes = [b"k>", b"k>\n ", b"k>{", b"<think>", b"x<think>y", b"<think> ", b"", b">a"]
    past = made.tokens_past(b"<think>")
    assert past[0] == [4]
    assert past[5] == [2, 4]
    assert past[6] == [4, 7]
