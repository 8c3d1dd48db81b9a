"""The process `evensong:worker-R.K`: rank K of replica R. Plans and calls come by a ring, results go back by another.

One thread does everything: it sleeps at one doorbell, which the core rings for a message and the device when a step
ends. Its lifeline is watched by a thread of its own; the end of it ends the process whatever it does.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from setproctitle import setproctitle

from evensong.config.sections import EngineConfig
from evensong.distributed.grid import Rank, RankGrid
from evensong.protocol.errors import ConfigError, EvensongError
from evensong.protocol.ranks import Call, FromRank, Reply, ToRanks, WorkerOrders, fault_of
from evensong.protocol.step import GrammarBitmask, SchedulerOutput
from evensong.utils.doorbell import Doorbell
from evensong.utils.lifeline import PARENT_GONE, be_killed_with_parent_thread, read_orders, watch
from evensong.utils.logging import configure_logging, get_logger
from evensong.utils.progress import ProgressPage
from evensong.utils.shm_ring import RingReader, RingWriter

logger = get_logger(__name__)

USAGE, FAILURE = 2, 1
# The core reads whenever it waits for anything; it takes this long only when it hangs.
ANSWER_SECONDS = 300.0
# After this call the worker can run steps: what is there stays.
LAST_OF_START = "initialize_from_config"


class Answers:
    """The ring to the core. One buffer serves all messages."""

    def __init__(self, orders: WorkerOrders) -> None:
        self._ring = RingWriter(orders.answers_fd, [Doorbell(orders.core_doorbell)])
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def send(self, kind: FromRank, record: Any = None) -> None:
        """Sends one message. Raises TypeError for what msgpack has no form for, and what the ring raises."""
        self._encoder.encode_into(record, self._buffer, 1)
        self._buffer[0] = kind
        self._ring.send(self._buffer, ANSWER_SECONDS)


class Methods:
    """The worker's public methods, called with arguments that are read as their declared types."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._types: dict[str, list[Any]] = {}

    def call(self, call: Call) -> Any:
        """What the method returns. Raises AttributeError for no such method, and what the method raises."""
        method = None if call.method.startswith("_") else getattr(self._worker, call.method, None)
        if not callable(method):
            raise AttributeError(f"the worker has no method {call.method!r}")
        types = self._types.get(call.method)
        if types is None:
            types = self._types[call.method] = _argument_types(method)
        types = types + [Any] * (len(call.args) - len(types))
        args = [msgspec.msgpack.decode(arg, type=kind) for arg, kind in zip(call.args, types, strict=False)]
        return method(*args)


class WorkerLoop:
    """Takes messages in order until it is told to end. A step that fails ends it with that error."""

    def __init__(self, worker: Any, reader: RingReader, doorbell: Doorbell, answers: Answers, page_fd: int) -> None:
        self._worker = worker
        self._methods = Methods(worker)
        self._reader = reader
        self._doorbell = doorbell
        self._answers = answers
        self._page_fd = page_fd
        self._plans = msgspec.msgpack.Decoder(SchedulerOutput)
        self._bitmasks = msgspec.msgpack.Decoder(GrammarBitmask | None)
        self._calls = msgspec.msgpack.Decoder(Call)

    def run(self) -> None:
        """Until END. Raises what a step raises."""
        while True:
            self._doorbell.wait()
            self._take_ready()
            while (message := self._reader.receive()) is not None:
                if message[0] == ToRanks.END:
                    return
                self._handle(message[0], memoryview(message)[1:])
                self._take_ready()

    def _handle(self, kind: int, body: memoryview) -> None:
        if kind == ToRanks.PLAN:
            plan = self._plans.decode(body)
            self._worker.execute_model(plan)
            if not plan.awaits_bitmask:
                self._worker.sample_tokens(None)
        elif kind == ToRanks.BITMASK:
            self._worker.sample_tokens(self._bitmasks.decode(body))
        elif kind == ToRanks.CALL:
            self._answer(self._calls.decode(body))

    def _answer(self, call: Call) -> None:
        """A call runs when nothing is in flight."""
        while self._worker.num_in_flight:
            self._take()
        try:
            result = self._methods.call(call)
            if call.method == LAST_OF_START:
                self._start_is_over()
            self._answers.send(FromRank.REPLY, Reply(call.call_id, msgspec.Raw(msgspec.msgpack.encode(result))))
        except Exception as error:  # the caller's; the worker lives on
            self._answers.send(FromRank.REPLY, Reply(call.call_id, fault=fault_of(error)))

    def _start_is_over(self) -> None:
        self._worker.watch_progress(ProgressPage(self._page_fd))
        self._worker.set_doorbell(self._doorbell.write_fd)
        # What start-up made stays; collections later need not walk it.
        gc.collect()
        gc.freeze()

    def _take_ready(self) -> None:
        while self._worker.num_in_flight and self._worker.output_ready():
            self._take()

    def _take(self) -> None:
        output = self._worker.take_output()
        if output is not None:
            self._answers.send(FromRank.OUTPUT, output)


def make_worker(orders: WorkerOrders, config: EngineConfig) -> Any:
    """The worker of these orders: it loads its weights."""
    module, _, name = orders.worker_class.partition(":")
    rank = rank_of(orders)
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return made(config, rank, orders.links_fd, orders.processors)


def rank_of(orders: WorkerOrders) -> Rank:
    """Where a worker stands."""
    return RankGrid(orders.tensor_parallel_size, orders.pipeline_parallel_size).rank(orders.rank)


def run_worker(fd: int) -> int:
    """Runs a worker whose lifeline is `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the launcher answers Ctrl-C
    try:
        orders = msgspec.msgpack.decode(read_orders(fd), type=WorkerOrders)
    except EOFError:
        return PARENT_GONE
    if orders.of_main_thread:
        be_killed_with_parent_thread()
    if orders.processors is not None:
        # Before any other thread is there: those to come inherit it.
        os.sched_setaffinity(0, orders.processors)
    watch(fd)
    setproctitle(f"evensong:{orders.title}")
    config = msgspec.msgpack.decode(orders.config, type=EngineConfig)
    logs = config.observability
    configure_logging(logs.log_level, orders.title, logs.log_format)
    answers = Answers(orders)
    try:
        worker = make_worker(orders, config)
        doorbell = Doorbell(orders.doorbell)
        loop = WorkerLoop(worker, RingReader(orders.plans_fd, orders.rank), doorbell, answers, orders.progress_fd)
        answers.send(FromRank.READY)
        loop.run()
    except BaseException as error:  # a SystemExit of foreign code is a failure like any other
        if not isinstance(error, EvensongError):
            logger.exception("the worker fails")
        answers.send(FromRank.FAILED, fault_of(error))
        return USAGE if isinstance(error, ConfigError) else FAILURE
    return 0


def _argument_types(method: Callable[..., Any]) -> list[Any]:
    hints = typing.get_type_hints(method)
    return [hints.get(name, Any) for name in inspect.signature(method).parameters]


def main(arguments: list[str]) -> int:
    """`python -m evensong.worker.process --bootstrap-fd N`."""
    if len(arguments) != 2 or arguments[0] != "--bootstrap-fd" or not arguments[1].isdigit():
        print("this is a child process of evensong; start `evensong serve` instead", file=sys.stderr)  # noqa: T201
        return USAGE
    return run_worker(int(arguments[1]))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Threads of the device may hold what an orderly interpreter exit waits for; nothing that matters is open.
    os._exit(code)
