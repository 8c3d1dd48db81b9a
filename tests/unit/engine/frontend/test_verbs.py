"""Control verbs become methods of front ends."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.engine.frontend.verbs import OWN, control_verbs
from evensong.protocol.control import VERBS


@control_verbs
class Caller:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call_verb(self, verb: str, **args: Any) -> str:
        self.calls.append((verb, args))
        return verb


def test_every_verb_is_a_method_with_its_line() -> None:
    for name, verb in VERBS.items():
        if name not in OWN:
            for known_as in (name, *verb.aliases):
                assert getattr(Caller, known_as).__doc__ == verb.doc


def test_arguments_by_place_and_by_name() -> None:
    caller: Any = Caller()
    assert caller.collective_rpc("ping", 3.0, args=[1]) == "collective_rpc"
    assert caller.calls == [("collective_rpc", {"method": "ping", "timeout": 3.0, "args": [1]})]


def test_too_many_arguments() -> None:
    caller: Any = Caller()
    with pytest.raises(TypeError, match="is_paused takes 0 arguments, got 1"):
        caller.is_paused(1)
