"""Control verbs: only those of the table, and every call gets an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from evensong.engine.core.control import Control
from evensong.engine.core.core import EngineCore, Outputs
from evensong.engine.core.pausing import Pausing
from evensong.protocol.control import VERBS
from evensong.protocol.output import FinishReason
from evensong.protocol.request import UtilityCall
from evensong.protocol.wire import pack, unpack
from tests.unit.engine.core.making import ask, make_core


@pytest.fixture
def core() -> Iterator[EngineCore]:
    made = make_core()
    yield made
    made.shutdown()


def call(core: EngineCore, verb: str, args: Any = None, emitted: list[Outputs] | None = None) -> Any:
    control = Control(core, (emitted if emitted is not None else []).append)
    reply = control.answer(UtilityCall(7, 0, verb, pack({} if args is None else args)))
    assert reply.call_id == 7
    return reply.failure if reply.failure is not None else unpack(reply.result)


def test_every_verb_of_the_table_acts(core: EngineCore) -> None:
    assert all(callable(getattr(Control, name, None) or getattr(Pausing, name)) for name in VERBS)
    assert call(core, "is_scheduler_empty") is True and call(core, "get_supported_tasks") == ["generate"]
    emitted: list[Outputs] = []
    core.add_request(ask("a"))
    core.step()
    assert call(core, "is_scheduler_empty") is False and call(core, "reset_prefix_cache") is False
    assert call(core, "check_kv_cache")["owned"] == 1
    assert call(core, "abort_requests", {"request_ids": ["a", "b"]}, emitted) is None
    assert [o.finish_reason for o in emitted[0][0]] == [FinishReason.ABORT]
    assert call(core, "reset_prefix_cache") is True and call(core, "check_kv_cache")["owned"] == 0
    assert call(core, "collective_rpc", {"method": "measure_token_rate"}) == [4000.0]


@pytest.mark.parametrize(
    ("verb", "args", "said"),
    [
        ("answer", None, "no control verb"),
        ("_core", None, "no control verb"),
        ("shutdown", None, "no control verb"),
        ("is_scheduler_empty", {"x": 1}, "takes no arguments"),
        ("is_scheduler_empty", [1], "takes no arguments"),
        ("collective_rpc", {"method": "get_model_limits"}, "object"),
    ],
)
def test_what_cannot_be_answered_is_a_failure_of_that_call(core: EngineCore, verb: str, args: Any, said: str) -> None:
    core.executor.get_model_limits = object  # type: ignore[method-assign,assignment]  # a result that cannot be sent
    failure = call(core, verb, args)
    assert failure.startswith(f"{verb} failed: ") and said in failure
    assert call(core, "is_scheduler_empty") is True
