"""Patterns of ECMA-262 match the same texts in the backend's syntax."""

from __future__ import annotations

import json

import pytest

from evensong.scheduler.grammar.schema.pattern import PatternError, none_of, translate_pattern
from tests.unit.scheduler.grammar.schema.walking import Grammar

FOUND: dict[str, tuple[list[str], list[str]]] = {
    "^a|b$": (["axx", "xxb"], ["xay", "ba"]),
    "(^a$|^b$)": (["a", "b"], ["ab", ""]),
    "": (["", "x"], []),
    "^$": ([""], ["a"]),
    r"\d": (["a1"], ["a", "٣"]),
    r"^\w$": (["_", "Z"], ["é", "-"]),
    r"^\s$": (["\t", "\u00a0", "\ufeff", "\u3000"], ["a", "\u200b"]),
    r"^\S+$": (["ab"], ["a b", "\u2003"]),
    "^.$": (["a", "🎉", "\u0085"], ["\n", "\r", "\u2028", "ab"]),
    "^[a[]$": (["a", "["], ["]", "b"]),
    "^[a&&b]$": (["a", "&", "b"], ["c"]),
    "^[--/]$": (["-", ".", "/"], [","]),
    r"^[\w.-]+$": (["a.-_9"], ["a b"]),
    r"^[^\W_]+$": (["aZ9"], ["_", "é"]),
    r"^\u00e9\x41\u{1F389}$": (["éA🎉"], ["eA🎉"]),
    r"^\ud83c\udf89$": (["🎉"], ["🎊"]),
    r"^\p{Lu}\P{L}$": (["É1"], ["é1", "Éa"]),
    "^a{,2}$": (["a{,2}"], ["aa"]),
    "^(?:ab){2,3}$": (["abab", "ababab"], ["ab", "aba"]),
    "^(?<year>[0-9]{4})?$": (["", "2024"], ["20"]),
    "^a+?b*?$": (["aab", "a"], ["b"]),
    r"^\cJ$": (["\n"], ["J"]),
    "^a/b$": (["a/b"], ["a"]),
    r"^[\s\S]{2}$": (["a\n", '"\\'], ["a"]),
    '^[^"]$': (["a", "\\", "\n"], ['"']),
    r"^\P{P}$": (["a", "1"], ['"', "\\", "!"]),
}


@pytest.mark.parametrize("pattern", FOUND)
def test_a_pattern_is_found_where_ecma_262_finds_it(pattern: str) -> None:
    matching, others = FOUND[pattern]
    grammar = Grammar({"type": "string", "pattern": pattern})
    assert [text for text in matching if not grammar.accepts(json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in others if grammar.accepts(json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?i)a", r"(a)\1", r"\ba", r"\Ba", "a^b", "a$b", "(^a)b", "^*"),
        *(
            "(",
            ")",
            "[a",
            "a{2,1}",
            "*a",
            "a**",
            r"\u12",
            r"\ud800",
            r"\p{Greek}",
            r"\q",
            "[]",
            "[b-a]",
            "\\",
            "[a-\\d]",
        ),
        *("a{1000000000}", "((a{99}){99}){99}", "(" * 60 + ")" * 60, "a" * 20_000, "\0"),
    ],
)
def test_what_has_no_translation_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        translate_pattern(pattern)


def test_all_texts_but_some() -> None:
    names = ["a", "ab", "id", "é", 'q"t']
    grammar = Grammar({"type": "string", "not": {"enum": names}})
    assert none_of(names)
    assert not any(grammar.accepts(json.dumps(name, ensure_ascii=False)) for name in names)
    assert all(grammar.accepts(json.dumps(text)) for text in ["", "b", "abc", "i", "idx", "q", 'q"'])
