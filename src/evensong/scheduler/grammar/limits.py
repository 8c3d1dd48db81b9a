"""What llguidance may do for one grammar. All is counted: the same grammar is refused on every machine, or on none."""

from __future__ import annotations

from typing import Any

import llguidance

# What these allow takes about a second to compile and some milliseconds a token at most (docs/structured-output.md).
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
_MAX_MESSAGE = 400


def parser_limits() -> llguidance.LLParserLimits:
    """The limits in the library's form."""
    return llguidance.LLParserLimits(**LIMITS, verbose_errors=False)


def one_line(reason: str) -> str:
    """A library's message, short enough for an error body."""
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " …"
