"""Grammars over a vocabulary of bytes, and texts pushed through them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import ReasoningSpec, StructuredOutputsParams
from evensong.scheduler.grammar.base import Backend, CompiledGrammar
from evensong.scheduler.grammar.llguidance_backend import LLGuidance
from evensong.scheduler.grammar.reasoning import ReasoningGate
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.scheduler.grammar.vocabulary import Vocabulary, has_bit
from evensong.scheduler.grammar.xgrammar_backend import XGrammar
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, FIRST_BYTE, byte_ids, byte_tokenizer

BACKENDS: dict[str, type[Any]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


@lru_cache
def vocabulary() -> Vocabulary:
    """All bytes, pairs of bytes, and special tokens."""
    tokenizer = byte_tokenizer()
    return Vocabulary(lambda: tokenizer, tokenizer.vocab_size)


@lru_cache
def backend(name: str = "llguidance") -> Backend:
    """One of each for all tests."""
    made: Backend = BACKENDS[name](vocabulary())
    return made


def compiled(name: str = "llguidance", **fields: Any) -> CompiledGrammar:
    """The grammar of StructuredOutputsParams(**fields)."""
    return backend(name).compile(StructuredOutputsParams(**fields))


def matches(grammar: CompiledGrammar, text: str) -> bool:
    """Whether every byte of the text may come, and then the end."""
    matcher = grammar.start()
    row = vocabulary().new_row()
    for token_id in byte_ids(text):
        matcher.fill(row)
        if not has_bit(row, token_id):
            assert not matcher.accept(token_id), "a token that the mask forbids was accepted"
            return False
        assert matcher.accept(token_id)
    return matcher.fill(row)


def allowed(row: Any) -> set[int]:
    """The tokens of a mask."""
    return {token_id for token_id in range(vocabulary().size) if has_bit(row, token_id)}


def texts_of(row: Any) -> set[str]:
    """What a mask allows, as text: single bytes in ASCII, and "EOS"."""
    named = {EOS_TOKEN_ID: "EOS"}
    return {
        named.get(i) or chr(i - FIRST_BYTE) for i in allowed(row) if i in named or FIRST_BYTE <= i < FIRST_BYTE + 128
    }


def request_grammar(
    grammar: CompiledGrammar | None, *, reasoning: ReasoningSpec | None = None, output: str = "", **params: Any
) -> RequestGrammar:
    """The state of a request whose output so far is `output`."""
    settings = SamplingParams(seed=1, max_tokens=100, **params)
    request = EngineCoreRequest(
        "a", [1, 2], settings, eos_token_ids=[EOS_TOKEN_ID], output_token_ids=byte_ids(output), reasoning=reasoning
    )
    gate = None
    if reasoning is not None:
        gate = ReasoningGate(reasoning, settings.thinking_token_budget, vocabulary())
    return RequestGrammar(request, None if grammar is None else grammar.start(), vocabulary(), gate)


def next_texts(state: RequestGrammar) -> set[str] | None:
    """What may come next, as `texts_of` shows it; None where anything may."""
    row = vocabulary().new_row()
    return texts_of(row) if state.fill(row) else None


def say(state: RequestGrammar, text: str) -> None:
    """A text of the output, byte by byte."""
    for token_id in byte_ids(text):
        state.accept(token_id)
