"""The process `evensong:core-R`: one EngineCore between two IO threads (spec B1-B4)."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from setproctitle import setproctitle

from evensong.config.sections import EngineConfig
from evensong.engine.core.core import EngineCore
from evensong.engine.core.handshake import ChildHandshake, begin_child, end_context
from evensong.engine.core.inbox import Failure, Inbox, Shutdown
from evensong.engine.core.io_threads import InputThread, OutputThread
from evensong.engine.core.loop import CoreLoop
from evensong.executor.base import Executor
from evensong.executor.factory import make_executor as make_configured
from evensong.protocol.errors import ConfigError, EvensongError
from evensong.protocol.handshake import Bootstrap, CoreInit, Failed, Ready
from evensong.protocol.step import SchedulerOutput
from evensong.protocol.wire import MessageType, Stamp
from evensong.utils.lifeline import PARENT_GONE
from evensong.utils.logging import configure_logging, get_logger
from evensong.utils.progress import ProgressPage
from evensong.utils.threads import run_in_time

logger = get_logger(__name__)

USAGE, FAILURE = 2, 1
SHUTDOWN_SECONDS = 2.0
MakeExecutor = Callable[[EngineConfig], Executor]


class SignalCallback:
    """Runs `call` in a thread of its own once a signal came: a handler itself does nothing but set an event."""

    def __init__(self, signal_number: int, call: Callable[[], None]) -> None:
        event = threading.Event()
        signal.signal(signal_number, lambda *_: event.set())

        def wait() -> None:
            event.wait()
            call()

        threading.Thread(target=wait, name="signal-callback", daemon=True).start()


class CoreProcess:
    """One core's life, from the lifeline's first bytes to its exit code."""

    def __init__(self, bootstrap: Bootstrap, make_executor: MakeExecutor) -> None:
        self._bootstrap = bootstrap
        self._make_executor = make_executor
        self._inbox: Inbox = Inbox()
        self._init: CoreInit | None = None
        self._init_came = threading.Event()
        self._loop_runs = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._handshake = ChildHandshake(bootstrap, self._on_message, self._context)

    def run(self) -> int:
        """The whole life; returns the exit code."""
        self._init_came.wait()
        assert self._init is not None
        core: EngineCore | None = None
        try:
            core = self._start(self._init)
            code = self._serve(core)
        except (Exception, SystemExit) as error:  # whatever stops the start, the launcher hears why
            code = self._failed(error)
        if core is not None:
            run_in_time(core.shutdown, SHUTDOWN_SECONDS, "shutdown")
        self._handshake.close()
        end_context(self._context)
        return code

    def stop(self, seconds: float) -> None:
        """Ends the core: after what runs, at the latest in `seconds`; at once while it still starts."""
        if not self._loop_runs.is_set():
            # Nothing is admitted yet, so nothing can be lost; loading a model has no place to stop in between.
            os._exit(0)
        self._inbox.put(Shutdown(seconds))

    def _start(self, init: CoreInit) -> EngineCore:
        config = msgspec.msgpack.decode(init.config, type=EngineConfig)
        logs = config.observability
        configure_logging(logs.log_level, f"core-{self._bootstrap.index}", logs.log_format)
        progress = ProgressPage(init.progress_fd)
        return EngineCore(config, lambda: self._make_executor(config), learned=init.learned, progress=progress)

    def _on_message(self, type: MessageType, payload: bytes) -> None:
        if type is MessageType.INIT and self._init is None:
            self._init = msgspec.msgpack.decode(payload, type=CoreInit)
            self._init_came.set()
        elif type is MessageType.SHUTDOWN:
            self.stop(msgspec.msgpack.decode(payload, type=float))

    def _failed(self, error: BaseException) -> int:
        usage = isinstance(error, ConfigError)
        if not isinstance(error, EvensongError):
            logger.exception("the core cannot start")
        message = str(error) if isinstance(error, EvensongError) else f"{type(error).__name__}: {error}"
        # A path in the message may hold bytes that are no text.
        self._handshake.send(MessageType.FAILED, Failed(message.encode("utf-8", "replace").decode(), usage))
        return USAGE if usage else FAILURE

    def _serve(self, core: EngineCore) -> int:
        assert self._init is not None
        stamp = Stamp(self._bootstrap.token, self._bootstrap.index, self._bootstrap.incarnation)
        clients = self._init.clients
        outputs = OutputThread(self._context, clients, stamp, self._inbox)
        inputs = InputThread(self._context, clients, stamp, self._inbox, core.aborts)
        core.executor.register_failure_callback(lambda reason: self._inbox.put(Failure(reason)))
        if core.failure is not None:
            self._inbox.put(Failure(core.failure))
        self._loop_runs.set()
        self._handshake.send(MessageType.READY, Ready(core.resources))
        code = 0
        try:
            CoreLoop(core, self._inbox, outputs.send).run()
        except BaseException as error:  # a SystemExit that a worker raised is a death like any other
            code = FAILURE
            # Clients first: they wait.
            outputs.send_death(f"{type(error).__name__}: {error}")
            logger.exception("the core dies; it ran %s", describe_plan(core.steps.current_plan))
            logger.error("scheduler: %s", core.scheduler.make_stats())
        inputs.close()
        outputs.close()
        return code


def describe_plan(plan: SchedulerOutput | None) -> str:
    """A plan in one line, ids and lengths only."""
    if plan is None:
        return "no step"
    new = [f"{r.request_id}({len(r.prompt_token_ids)}+{len(r.output_token_ids)})" for r in plan.new_requests]
    return f"step {plan.step_id}: tokens {plan.num_scheduled_tokens}, new {new}, released {plan.released_request_ids}"


def run_core(fd: int, make_executor: MakeExecutor | None = None) -> int:
    """Runs a core whose lifeline is `fd`, with the executor that its settings name; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the launcher answers Ctrl-C
    try:
        bootstrap = begin_child(fd)
    except EOFError:
        return PARENT_GONE
    setproctitle(f"evensong:core-{bootstrap.index}")
    configured = functools.partial(make_configured, replica=bootstrap.index)
    process = CoreProcess(bootstrap, make_executor or configured)
    SignalCallback(signal.SIGTERM, lambda: process.stop(0.0))
    return process.run()


def main(arguments: list[str]) -> int:
    """`python -m evensong.engine.core.process --bootstrap-fd N`."""
    if len(arguments) != 2 or arguments[0] != "--bootstrap-fd" or not arguments[1].isdigit():
        print("this is a child process of evensong; start `evensong serve` instead", file=sys.stderr)  # noqa: T201
        return USAGE
    return run_core(int(arguments[1]))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Daemon threads may hold what an orderly interpreter exit waits for; all that matters was closed above.
    os._exit(code)
