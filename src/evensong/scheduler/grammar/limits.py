"""What llguidance may do for one grammar. All is counted: the same grammar is refused on every machine, or on none."""

from __future__ import annotations

from typing import Any

import llguidance

# What these allow takes about a second to compile, and some tens of milliseconds a token at most: 20,000 states of a
# lexer are found in 0.05 s, and take 14 MB (measured).
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    # What a step costs depends on the states that others have found; only their number may end an output.
    "step_lexer_fuel": 1 << 40,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
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
