"""llguidance: the default backend. A Rust library, byte-level, without torch; its limits are counts, not clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llguidance

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar.base import (
    Backend,
    Bitmask,
    CompiledGrammar,
    GrammarFault,
    Matcher,
    alternatives,
    invalid_grammar,
    never,
)
from evensong.scheduler.grammar.lark import user_lark
from evensong.scheduler.grammar.limits import one_line, parser_limits
from evensong.scheduler.grammar.schema.prepare import prepare_schema, schema_options
from evensong.scheduler.grammar.structural_tag import structural_tag_grammar
from evensong.scheduler.grammar.trial import try_grammar
from evensong.scheduler.grammar.vocabulary import Vocabulary, clear_bits, has_bit

# Kinds whose grammars are bounded before the library sees them; others are tried in a process of their own.
_BOUNDED = ("json", "json_object", "choice")


class LLGuidance(Backend):
    """One tokenizer of the library's, made from the vocabulary's bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.size + 1, eos_token=vocabulary.end_id)

    def compile(self, params: StructuredOutputsParams, cancelled: Callable[[], bool] = never) -> CompiledGrammar:
        grammar = grammar_text(params, self._vocabulary)
        if params.kind not in _BOUNDED:
            try_grammar(params.kind, grammar, cancelled)
        return _Compiled(params.kind, grammar, self._tokenizer, self._vocabulary)


class _Tokens:
    """What the library asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_id
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._vocabulary.tokenizer.encode(text, add_special_tokens=False)


class _Compiled(CompiledGrammar):
    """A grammar that is known to compile.

    Copies of a matcher share the states that its lexer has found: what one output met is there for the next. They also
    share the limit on those states (measured, 1.9.1), which would make an output's end depend on others. So a copy that
    reaches it goes on alone (`_Matcher`), and the next output begins with a matcher compiled anew.
    """

    def __init__(self, kind: str, grammar: str, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._kind = kind
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._shared: Any = self.compile()

    def start(self) -> Matcher:
        shared = self._shared
        if shared is None:
            shared = self._shared = self.compile()
        return _Matcher(shared.deep_copy(), self, self._vocabulary)

    def wear_out(self) -> None:
        """The states that are shared are too many for others to join."""
        self._shared = None

    def compile(self) -> Any:
        """A matcher of the library's that shares nothing. Raises RequestError."""
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            # The first mask takes the most: what is too much at once is refused here.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(self._kind, matcher.get_error())
        return matcher


class _Matcher(Matcher):
    def __init__(self, matcher: Any, grammar: _Compiled, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._end_id = vocabulary.end_id
        self._shares = True
        self._token_ids: list[int] = []

    def fill(self, row: Bitmask) -> bool:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            self._go_alone(row)
        may_end = has_bit(row, self._end_id)
        clear_bits(row, [self._end_id])
        return may_end

    def accept(self, token_id: int) -> bool:
        self._token_ids.append(token_id)
        return bool(self._matcher.consume_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        del self._token_ids[len(self._token_ids) - num_tokens :]
        self._matcher.rollback(num_tokens)

    def _go_alone(self, row: Bitmask) -> None:
        """The mask as it is where no other output shares anything: every step once more, as if it had been so."""
        if self._shares:
            self._shares = False
            self._grammar.wear_out()
            self._matcher = self._grammar.compile()
            for token_id in self._token_ids:
                self._matcher.compute_bitmask()
                self._matcher.consume_token(token_id)
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarFault(one_line(self._matcher.get_error()))


def grammar_text(params: StructuredOutputsParams, vocabulary: Vocabulary) -> str:
    """The library's form of what is asked for. Raises RequestError."""
    match params.kind:
        case "json" | "json_object":
            schema = params.json if isinstance(params.json, str) else '{"type": "object"}'
            return prepare_schema(schema, **schema_options(params))
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(unanchored(str(params.regex))))
        case "choice":
            return str(llguidance.LLMatcher.grammar_from_lark(f"start: {alternatives(params.choice or ())}"))
        case "grammar":
            return str(llguidance.LLMatcher.grammar_from_lark(user_lark(str(params.grammar))))
        case _:
            return structural_tag_grammar(params, vocabulary.special_texts)


def unanchored(pattern: str) -> str:
    """A pattern without anchors at its ends: the whole output has to match in any case."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\")) if pattern.endswith("$") else 1
    return pattern[:-1] if backslashes % 2 == 0 else pattern


def _refusal(kind: str, reason: str) -> RequestError:
    return invalid_grammar(f"{kind} cannot be compiled: {one_line(reason)}")
