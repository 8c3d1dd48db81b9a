"""The real core process with scripted tokens in place of a model; $SCRIPTED_CORE is FakeExecutor's settings as JSON."""

from __future__ import annotations

import json
import os
import sys

from evensong.engine.core.process import run_core
from evensong.executor.base import Executor
from evensong.testing.fake_executor import FakeExecutor


def make_executor(*_: object) -> Executor:
    return FakeExecutor(**json.loads(os.environ.get("SCRIPTED_CORE", "{}")))


if __name__ == "__main__":
    sys.exit(run_core(int(sys.argv[2]), make_executor))
