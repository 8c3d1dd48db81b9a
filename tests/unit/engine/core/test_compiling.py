"""Requests whose grammars are compiled: admitted later, refused, aborted, over their time, in the loop and without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from evensong.engine.core import compiling as compiling_module
from evensong.engine.core.core import EngineCore
from evensong.protocol.errors import RequestError
from evensong.protocol.output import Admission, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar import manager as manager_module
from evensong.scheduler.grammar.base import CompiledGrammar
from evensong.scheduler.grammar.manager import StructuredOutputManager
from tests.unit.engine.core.making import ask, make_core
from tests.unit.scheduler.grammar.matching import backend, vocabulary


class Slow:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        self.cancelled: Any = None

    def compile(self, params: StructuredOutputsParams, cancelled: Any) -> CompiledGrammar:
        self.cancelled = cancelled
        self.began.set()
        assert self.go.wait(20)
        if params.regex == "boom":
            raise ZeroDivisionError
        return backend().compile(params)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(manager_module, "_load_backend", lambda name, vocabulary: made)
    yield made
    made.go.set()


@pytest.fixture
def core(slow: Slow) -> Iterator[EngineCore]:
    made = make_core(max_num_queued_reqs=2)
    made.compiling = compiling_module.Compiling(StructuredOutputManager(vocabulary))
    yield made
    slow.go.set()
    made.shutdown()


def constrained(name: str, regex: str = "a+", **fields: Any) -> EngineCoreRequest:
    request = ask(name, **fields)
    own = msgspec.structs.replace(request.params, structured_outputs=StructuredOutputsParams(regex=regex))
    return msgspec.structs.replace(request, params=own)


def admissions(core: EngineCore, count: int = 1) -> list[Admission]:
    found: list[Admission] = []
    until = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until:
        core.compiling.wait()
        found += [admission for _, admission in core.take_admissions()]
    return found


def test_a_request_is_admitted_once_its_grammar_is_there(core: EngineCore, slow: Slow) -> None:
    assert core.add_request(constrained("a")) is None
    assert core.take_admissions() == [] and not core.scheduler.has_requests()
    assert core.request_ids() == ["a"]
    slow.go.set()
    (admission,) = admissions(core)
    assert admission.request_id == "a" and admission.refusal is None
    assert core.scheduler.requests["a"].grammar is not None and len(core.compiling) == 0


def test_others_run_meanwhile(core: EngineCore) -> None:
    assert core.add_request(constrained("a")) is None
    admission = core.add_request(ask("b"))
    assert admission is not None and admission.refusal is None
    assert core.step()[1]


def test_what_cannot_be_compiled_is_refused(core: EngineCore, slow: Slow) -> None:
    slow.go.set()
    core.add_request(constrained("a", "((("))
    core.add_request(constrained("b", "boom"))
    found = {admission.request_id: admission.refusal for admission in admissions(core, 2)}
    assert found["a"] is not None and found["a"].status == 400
    assert found["b"] is not None and found["b"].status == 500
    assert core.request_ids() == []


def test_an_abort_ends_it_before_its_admission(core: EngineCore, slow: Slow) -> None:
    core.add_request(constrained("a", client_index=3))
    assert slow.began.wait(20) and not slow.cancelled()
    outputs = core.finish_requests(["a"], FinishReason.ABORT)
    assert outputs[3][0].finish_reason is FinishReason.ABORT and slow.cancelled()
    assert [(index, admission.refusal) for index, admission in core.take_admissions()] == [(3, None)]
    slow.go.set()
    time.sleep(0.05)
    assert core.take_admissions() == [] and core.request_ids() == []


def test_an_id_that_lives_is_refused(core: EngineCore) -> None:
    core.add_request(constrained("a"))
    again = core.add_request(constrained("a"))
    assert again is not None and again.refusal is not None and again.refusal.status == 409


def test_what_is_compiled_counts_as_queued(core: EngineCore) -> None:
    """64 slots and a queue of 2."""
    answers = [core.add_request(constrained(f"r{index}")) for index in range(core.scheduler.limits.max_num_seqs + 3)]
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) == 1 and refused[0].refusal is not None and refused[0].refusal.status == 429


def test_a_prompt_that_can_never_run_is_refused_at_once(core: EngineCore) -> None:
    answer = core.add_request(constrained("a", prompt=[1] * 300))
    assert answer is not None and answer.refusal is not None and answer.refusal.status == 400


def test_a_time_limit_holds_while_it_is_compiled(core: EngineCore) -> None:
    core.add_request(constrained("a", timeout=0.01, arrival_time=time.time()))
    time.sleep(0.02)
    outputs = core.end_overdue()
    assert outputs[0][0].stop_reason == "timeout" and core.request_ids() == []


def test_a_compilation_without_end_is_given_up(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling_module, "BACKSTOP_SECONDS", 0.01)
    core.add_request(constrained("a"))
    assert 0.0 <= (core.seconds_left() or 0.0) <= 0.01
    (admission,) = admissions(core)
    assert admission.refusal is not None and admission.refusal.status == 503 and admission.refusal.retry_after


def test_a_fault_in_a_step_ends_the_request_alone(core: EngineCore, slow: Slow) -> None:
    slow.go.set()
    core.add_request(constrained("a"))
    admissions(core)
    core.add_request(ask("b", max_tokens=2))
    request = core.scheduler.requests["a"]
    assert request.grammar is not None
    request.grammar.fault = "too many items"
    outputs, _ = core.step()
    by_id = {output.request_id: output for output in outputs[0]}
    error = by_id["a"].error
    assert by_id["a"].finish_reason is FinishReason.ERROR and error is not None and error.status == 400
    assert by_id["b"].finish_reason is None and by_id["b"].new_token_ids


def test_a_request_error_is_one(core: EngineCore) -> None:
    with pytest.raises(RequestError):
        core.scheduler.prepare_request(ask("a", prompt=[1] * 300))
