"""Trials: what would end the process that compiles it ends a child's."""

from __future__ import annotations

import time

import pytest

from evensong.protocol.errors import RequestError
from evensong.scheduler.grammar import trial
from evensong.scheduler.grammar.lark import MAX_RULES, user_lark
from tests.unit.scheduler.grammar.matching import compiled


def chain(num_rules: int, body: str = 'r{} "a"') -> str:
    rules = [f"r{i}: {body.format(i + 1, i + 1)}" for i in range(num_rules)]
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])


def test_a_grammar_that_ends_its_compiler_ends_a_child() -> None:
    with pytest.raises(RequestError, match="nested too deeply") as refused:
        trial.try_grammar("grammar", chain(20_000))
    assert refused.value.status == 400


def test_a_grammar_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = chain(3000, "R{} R{}").replace("r", "R").replace("staRt", "start")
    with pytest.raises(RequestError, match="processor time") as refused:
        trial.try_grammar("grammar", terminals)
    assert refused.value.status == 400


def test_a_machine_that_is_too_busy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WALL_SECONDS", 0.001)
    with pytest.raises(RequestError) as refused:
        trial.try_grammar("regex", "start: /a/")
    assert refused.value.status == 503 and refused.value.retry_after


def test_a_good_grammar_passes() -> None:
    trial.try_grammar("grammar", chain(10))


def test_rules_are_counted() -> None:
    user_lark(chain(MAX_RULES - 2))
    with pytest.raises(RequestError, match="501 rules"):
        user_lark(chain(MAX_RULES - 1))
    with pytest.raises(RequestError, match="rules"):
        user_lark("root ::= r0\n" + "\n".join(f'r{i} ::= "a"' for i in range(MAX_RULES)))


def test_schemas_in_a_grammar_are_checked() -> None:
    lark = 'start: "x" %json {"type": "integer", "minimum": 3} "y"'
    assert "%json" in user_lark(lark)
    with pytest.raises(RequestError, match="json"):
        user_lark("start: %json {broken")


@pytest.mark.parametrize(
    "text", ["(" * 100_000, "root ::= " + "(" * 100_000, "start: " + "(" * 100_000, "start: " + "x" * 200_000]
)
def test_deep_brackets_are_refused(text: str) -> None:
    for kind in ("grammar", "regex"):
        with pytest.raises(RequestError):
            compiled(**{kind: text + ")"})


def test_a_trial_that_nobody_waits_for_ends_at_once() -> None:
    terminals = chain(3000, "R{} R{}").replace("r", "R").replace("staRt", "start")
    began = time.monotonic()
    with pytest.raises(RequestError, match="aborted"):
        trial.try_grammar("grammar", terminals, lambda: time.monotonic() > began + 0.3)
    assert time.monotonic() - began < 2
