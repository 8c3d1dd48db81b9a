"""StructuredOutputManager: compiled once, forgotten in time; what fails is one request's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from evensong.protocol.errors import RequestError
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import ReasoningSpec, StructuredOutputsParams
from evensong.scheduler.grammar import manager as manager_module
from evensong.scheduler.grammar.base import CompiledGrammar
from evensong.scheduler.grammar.manager import StructuredOutputManager, needs_grammar
from evensong.testing.byte_tokenizer import byte_ids
from tests.unit.scheduler.grammar.matching import backend, next_texts, vocabulary


@pytest.fixture
def grammars() -> Iterator[StructuredOutputManager]:
    made = StructuredOutputManager(vocabulary)
    yield made
    made.shutdown()


def ask(output: str = "", reasoning: ReasoningSpec | None = None, **params: Any) -> EngineCoreRequest:
    settings = SamplingParams(seed=1, max_tokens=50, **params)
    return EngineCoreRequest("a", [1], settings, output_token_ids=byte_ids(output), reasoning=reasoning)


def test_only_what_is_constrained_needs_a_grammar() -> None:
    spec = ReasoningSpec("</think>", byte_ids("</think>"))
    assert needs_grammar(ask(structured_outputs={"regex": "a"}))
    assert needs_grammar(ask(thinking_token_budget=3, reasoning=spec))
    assert not needs_grammar(ask())
    assert not needs_grammar(ask(reasoning=spec))
    assert not needs_grammar(ask(thinking_token_budget=3))


def test_nothing_is_loaded_before_the_first_request() -> None:
    def never() -> Any:
        raise AssertionError("loaded")

    before = threading.active_count()
    StructuredOutputManager(never).shutdown()
    assert threading.active_count() == before


def test_a_grammar_is_compiled_once(grammars: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[StructuredOutputsParams] = []
    real = backend()

    class Counting:
        def compile(self, params: StructuredOutputsParams, cancelled: Any) -> CompiledGrammar:
            calls.append(params)
            return real.compile(params)

    monkeypatch.setattr(manager_module, "_load_backend", lambda name, made: Counting())
    for output in ("", "a"):
        state = grammars.submit(ask(output, structured_outputs={"regex": "ab"})).result(20)
        assert next_texts(state) == ({"b"} if output else {"a"})
    assert len(calls) == 1
    grammars.submit(ask(structured_outputs={"regex": "ac"})).result(20)
    assert len(calls) == 2


def test_the_oldest_grammars_are_forgotten(grammars: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "MAX_CACHED", 2)
    for name in ("a", "b", "c"):
        grammars.submit(ask(structured_outputs={"choice": [name]})).result(20)
    assert len(grammars._compiled) == 2
    monkeypatch.setattr(manager_module, "MAX_CACHED_CHARACTERS", 100)
    grammars.submit(ask(structured_outputs={"choice": ["d" * 200]})).result(20)
    assert len(grammars._compiled) == 0 and grammars._num_characters == 0


def test_what_cannot_be_compiled_fails_its_own_request(grammars: StructuredOutputManager) -> None:
    bad = grammars.submit(ask(structured_outputs={"regex": "((("}))
    good = grammars.submit(ask(structured_outputs={"regex": "a"}))
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        bad.result(20)
    assert next_texts(good.result(20)) == {"a"}


def test_output_that_does_not_fit_is_refused(grammars: StructuredOutputManager) -> None:
    with pytest.raises(RequestError, match="does not fit"):
        grammars.submit(ask("b", structured_outputs={"choice": ["a"]})).result(20)


def test_a_grammar_may_hold_from_the_first_token_on(grammars: StructuredOutputManager) -> None:
    spec = ReasoningSpec("</think>", byte_ids("</think>"))
    inside = {"choice": ["a"], "enable_in_reasoning": True}
    assert next_texts(grammars.submit(ask(reasoning=spec, structured_outputs=inside)).result(20)) == {"a"}
    state = grammars.submit(ask(reasoning=spec, structured_outputs={"choice": ["a"]})).result(20)
    assert len(next_texts(state) or ()) > 100
