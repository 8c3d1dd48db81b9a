"""Chat templates that come with requests: each is rendered in a process of its own, with limits on what it may use.

Jinja's sandbox keeps a template from reaching out of it, but not from counting to a trillion, nor from growing a text
by doubling. The kernel does: the process has so many seconds of processor time, whatever else runs, and so much memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from evensong.protocol.errors import RequestError
from evensong.utils import bounded_child
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

CPU_SECONDS = 1
MEMORY_BYTES = 1 << 30
MAX_SOURCE_CHARS = 64 * 1024
MAX_OUTPUT_CHARS = 4 * 1024 * 1024
# How many run at once, and how many wait for that; more is an overload.
MAX_RUNNING, MAX_WAITING = 2, 32
# Only where the machine is so busy that the process does not get its second.
WALL_SECONDS = 30.0
RETRY_AFTER_SECONDS = 2
CHILD_MODULE = "evensong.engine.frontend.template_child"


@dataclass(frozen=True)
class TemplateOrder:
    """What a child renders: ChatTemplate's arguments. It travels as JSON, in which a request's values came."""

    source: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    options: dict[str, Any]


class ForeignTemplates:
    """Renders templates of requests. For one event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._num_waiting = 0

    async def render(self, order: TemplateOrder) -> str:
        """The prompt. Raises RequestError: 400 for what the template does, 503 where too many want this at once."""
        if len(order.source) > MAX_SOURCE_CHARS:
            raise RequestError(f"chat_template has more than {MAX_SOURCE_CHARS} characters", param="chat_template")
        if self._num_waiting >= MAX_WAITING:
            raise _overloaded("too many requests bring chat templates of their own")
        self._num_waiting += 1
        try:
            async with self._slots:
                answer = await _run(json.dumps(asdict(order)).encode())
        finally:
            self._num_waiting -= 1
        if "error" in answer:
            raise RequestError(answer["error"], param=answer["param"], code=answer["code"])
        return str(answer["text"])


async def _run(order: bytes) -> dict[str, Any]:
    """What the child answers: text, or an error's message, param and code."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CHILD_MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=bounded_child.environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(WALL_SECONDS):
            # A child that is killed early reads no further; its end is seen below. The pipe stays open.
            with contextlib.suppress(ConnectionError):
                process.stdin.write(bounded_child.framed(order))
                await process.stdin.drain()
            answer = await process.stdout.read()
            await process.wait()
    except TimeoutError as error:
        raise _overloaded("the server is too busy to render a chat template") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.stdin.close()
        # Also where the request was cancelled: nothing is left behind.
        await asyncio.shield(process.wait())
    if process.returncode != 0:
        logger.info("the process of a request's chat template ended with %s", process.returncode)
        raise RequestError(
            f"the chat template was stopped: it may use {CPU_SECONDS} s of processor time and "
            f"{MEMORY_BYTES >> 20} MiB of memory",
            param="chat_template",
        )
    result: dict[str, Any] = json.loads(answer)
    return result


def _overloaded(message: str) -> RequestError:
    return RequestError(message, status=503, type="server_error", code="overloaded", retry_after=RETRY_AFTER_SECONDS)
