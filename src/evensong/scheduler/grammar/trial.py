"""Trials: grammars that users wrote are compiled in a process of their own before the core compiles them.

llguidance counts most of what it does, but not how deep it calls itself: a grammar of some thousand rules, each made of
the next, ends the process that compiles it (measured, 1.9.1). Schemas are bounded before they get there
(scheduler/grammar/schema/prepare.py); for everything else the kernel bounds a trial: so many seconds of processor time,
whatever else runs, and so much memory.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable

from evensong.protocol.errors import RequestError
from evensong.scheduler.grammar.base import invalid_grammar, never
from evensong.utils import bounded_child
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

CPU_SECONDS = 3
MEMORY_BYTES = 2 << 30
# Only where the machine is so busy that the process does not get its seconds.
WALL_SECONDS = 30.0
RETRY_AFTER_SECONDS = 2
_POLL_SECONDS = 0.05
CHILD_MODULE = "evensong.scheduler.grammar.trial_child"
_TOKEN_ID = re.compile(r"<\[\d+\]>")


def try_grammar(kind: str, grammar: str, cancelled: Callable[[], bool] = never) -> None:
    """Raises RequestError: 400 for what cannot be compiled, or not within the limits; 503 on a machine too busy to say.

    `grammar` is the library's own form. Where it is `cancelled` the child is ended at once.
    """
    # A trial's vocabulary is bytes: one token is as good as another.
    order = _TOKEN_ID.sub("<[0]>", grammar).encode()
    with subprocess.Popen(
        [sys.executable, "-m", CHILD_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=bounded_child.environment(),
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            # A child that is killed early reads no further. The pipe stays open.
            with contextlib.suppress(ConnectionError):
                child.stdin.write(bounded_child.framed(order))
                child.stdin.flush()
            code = _ended(child, cancelled)
            answer = child.stdout.read()
        finally:
            child.kill()
    if code != 0:
        logger.info("the process that tried a request's %s ended with %d", kind, code)
        raise invalid_grammar(
            f"{kind} cannot be compiled: it is nested too deeply, or takes more than {CPU_SECONDS} s of processor time "
            f"or {MEMORY_BYTES >> 20} MiB of memory"
        )
    error_text = json.loads(answer)["error"]
    if error_text is not None:
        raise invalid_grammar(f"{kind} cannot be compiled: {error_text}")


def _ended(child: subprocess.Popen[bytes], cancelled: Callable[[], bool]) -> int:
    """The child's exit code, once it has one."""
    until = time.monotonic() + WALL_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL_SECONDS)
        if cancelled():
            raise RequestError("the request was aborted while its grammar was compiled", status=499)
    message = "the server is too busy to compile a grammar"
    raise RequestError(message, status=503, type="server_error", code="overloaded", retry_after=RETRY_AFTER_SECONDS)
