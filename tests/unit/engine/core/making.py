"""A core over a scripted executor, and messages for it."""

from __future__ import annotations

from typing import Any

from evensong.config.resolve import resolve
from evensong.engine.core.core import EngineCore
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.wire import Stamp
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.testing.fake_executor import FakeExecutor

STAMP = Stamp(b"t" * 16, 0, 1)


def make_core(executor: FakeExecutor | None = None, **settings: Any) -> EngineCore:
    """A core of 64 blocks whose executor is scripted."""
    base = {"model": "demo", "num_kv_blocks_override": 64, "max_model_len": 256}
    return EngineCore(resolve(base | settings), lambda: executor or FakeExecutor())


def ask(request_id: str, prompt: list[int] | None = None, max_tokens: int = 4, **fields: Any) -> EngineCoreRequest:
    """A request."""
    return EngineCoreRequest(request_id, prompt or [1, 2], SamplingParams(seed=1, max_tokens=max_tokens), **fields)


class AnyToken(RequestGrammar):
    """A grammar that allows all, by saying nothing."""

    num_words = 1

    def __init__(self) -> None:
        self.fault = None

    def fill(self, row: object) -> bool:
        return False

    def accept(self, token_id: int) -> bool:
        return False
