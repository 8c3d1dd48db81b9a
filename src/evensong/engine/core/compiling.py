"""Compiling: requests between their ADD and their admission, while their grammars are compiled off the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from evensong.protocol.errors import ErrorBody, RequestError
from evensong.scheduler.grammar.manager import StructuredOutputManager
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.scheduler.request import Request
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

# Grammars are refused by counts, which end a compilation long before. A machine that is this slow says so.
BACKSTOP_SECONDS = 60.0


@dataclass(frozen=True)
class _Job:
    request: Request
    future: Future[RequestGrammar]
    cancelled: threading.Event
    began: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled.set()
        self.future.cancel()


def _nobody() -> None:
    """Nobody waits for grammars."""


class Compiling:
    """Used by the core's thread; `on_ready` is called in another one when a compilation has ended."""

    def __init__(self, grammars: StructuredOutputManager) -> None:
        self._grammars = grammars
        self._jobs: dict[str, _Job] = {}
        self._ended = threading.Event()
        self.on_ready: Callable[[], None] = _nobody

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def requests(self) -> list[Request]:
        """Those that are not admitted yet, in order of arrival."""
        return [job.request for job in self._jobs.values()]

    def begin(self, request: Request) -> None:
        """Its grammar is compiled, behind those that came before."""
        cancelled = threading.Event()
        future = self._grammars.submit(request.source, cancelled.is_set)
        self._jobs[request.request_id] = _Job(request, future, cancelled)
        future.add_done_callback(self._note)

    def take_ready(self) -> Iterator[tuple[Request, RequestGrammar | ErrorBody]]:
        """Requests whose grammars are there, or what they are refused with."""
        self._ended.clear()
        for request_id, job in list(self._jobs.items()):
            if job.future.done():
                del self._jobs[request_id]
                yield job.request, _result_of(job)
            elif time.monotonic() - job.began > BACKSTOP_SECONDS:
                del self._jobs[request_id]
                job.cancel()
                logger.warning("request %s: its grammar was not compiled in %.0f s", request_id, BACKSTOP_SECONDS)
                message = "the grammar was not compiled in time: too much is compiled at once"
                yield job.request, ErrorBody(message, 503, "server_error", code="grammar_timeout", retry_after=5)

    def cancel(self, request_id: str) -> Request | None:
        """Forgets a request; what is being compiled for it ends. None for an id that is not here."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        job.cancel()
        return job.request

    def shutdown(self) -> None:
        """Compiles nothing more."""
        for job in self._jobs.values():
            job.cancel()
        self._grammars.shutdown()

    def wait(self) -> None:
        """Until a compilation ends, where one is under way: for a core that its caller steps."""
        if self._jobs and not any(job.future.done() for job in self._jobs.values()):
            self._ended.wait(self.seconds_left())

    def seconds_left(self) -> float | None:
        """Until the oldest one is over its time; None where there is none."""
        first = next(iter(self._jobs.values()), None)
        return None if first is None else max(first.began + BACKSTOP_SECONDS - time.monotonic(), 0.0)

    def _note(self, future: Future[RequestGrammar]) -> None:
        self._ended.set()
        self.on_ready()


def _result_of(job: _Job) -> RequestGrammar | ErrorBody:
    try:
        return job.future.result()
    except RequestError as error:
        return error.body()
    except BaseException as error:  # a bug, here or in a grammar library: a panic of one's is no Exception
        logger.exception("the grammar of request %s failed", job.request.request_id)
        return ErrorBody(f"the grammar failed to compile: {type(error).__name__}: {error}", 500, "internal_error")
